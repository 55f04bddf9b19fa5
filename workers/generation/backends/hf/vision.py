"""The prefill of a prompt with an image.

- Generated tokens are always looked up in the embedding, one that equals the image token as well: after a resume they
  go through the model in a pass of their own, without the image.
- mRoPE models take positions (3, rows, length); all three are equal for text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from pipeline.errors import RequestError
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.backends.hf.passes import chosen, forward, forward_scored
from workers.generation.preprocess import VisionInputs


def prefill_image(
    model: LoadedModel,
    vision: VisionInputs,
    tokens: Sequence[int],
    cache: Cache,
    first: int | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Fill the cache with the prompt and the tokens generated so far.

    Returns (logits (1, vocab), logprobs of `tokens[first:]` (1, n), next position - length); `first` None: of none;
    `temperature`: of these logprobs.
    Raises RequestError if the model does not take what the processor made.
    """
    module, device = model.module, torch.device(model.facts.device)
    inputs = torch.tensor([vision.token_ids], device=device)
    length = inputs.shape[1]
    tensors = {name: _placed(value, module) for name, value in vision.tensors.items()}
    types = vision.token_types.to(device)
    try:
        positions, offset = _positions(model, inputs, types, tensors)
        if "mm_token_type_ids" in inspect.signature(module.forward).parameters:
            tensors["mm_token_type_ids"] = types
        logits = forward(model, inputs, torch.ones_like(inputs, dtype=torch.bool), positions, cache, keep=1, **tensors)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # not the image's fault alone: the engine ends, and its jobs are decoded elsewhere
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RequestError(
            f"the model does not take the image as its processor made it ({type(error).__name__}: {error}); compare "
            "the processor's files with the model's config.json, or send a smaller image"
        ) from error
    more = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
    scores = chosen(logits, more[:, :1] if first == 0 else more[:, :0], [temperature])
    logits = logits[:, -1]
    if tokens:
        mask = torch.ones(1, length + len(tokens), dtype=torch.bool, device=device)
        positions = torch.arange(length, length + len(tokens), device=device).unsqueeze(0) + offset
        rest = None if first is None or len(tokens) == 1 else max(first, 1)
        logits, others = forward_scored(model, more, mask, positions, cache, rest, [temperature])
        scores = torch.cat([scores, others], dim=1)
    return logits, scores, offset


def _positions(
    model: LoadedModel, inputs: torch.Tensor, types: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Positions of the prompt, and next position - length after it."""
    if model.rope_index is None:
        return torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0), 0
    known = inspect.signature(model.rope_index).parameters
    given: dict[str, Any] = {"mm_token_type_ids": types, **tensors}
    positions, delta = model.rope_index(inputs, **{name: value for name, value in given.items() if name in known})
    return positions, int(delta)


def _placed(value: torch.Tensor, module: Any) -> torch.Tensor:
    return value.to(module.device, module.dtype) if value.is_floating_point() else value.to(module.device)
