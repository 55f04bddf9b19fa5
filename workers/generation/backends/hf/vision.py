"""Forward passes, those over a prompt with an image among them.

- Generated tokens are always looked up in the embedding, one that equals the image token as well: after a resume they
  go through the model in a pass of their own, without the image.
- mRoPE models take positions (3, rows, length); all three are equal for text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache

from pipeline.errors import RequestError
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.preprocess import VisionInputs


def forward(
    model: LoadedModel,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    **image: torch.Tensor,
) -> torch.Tensor:
    """float32 logits of the last position, (rows, vocab).

    `inputs` (rows, new), `mask` (rows, cached + new), `positions` (rows, new) or (3, rows, new).
    """
    if model.rope_index is not None and positions.ndim == 2:
        positions = positions.expand(3, *positions.shape)
    output = model.module(
        input_ids=inputs,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **image,
        **model.last_logits_only,
    )
    return output.logits[:, -1].float()


def prefill_image(
    model: LoadedModel, vision: VisionInputs, tokens: Sequence[int], cache: DynamicCache
) -> tuple[torch.Tensor, int]:
    """Fill the cache with the prompt and the tokens generated so far: (logits (1, vocab), next position - length).

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
        logits = forward(model, inputs, torch.ones_like(inputs, dtype=torch.bool), positions, cache, **tensors)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # not the image's fault alone: the engine ends, and its jobs are decoded elsewhere
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RequestError(
            f"the model does not take the image as its processor made it ({type(error).__name__}: {error}); compare "
            "the processor's files with the model's config.json, or send a smaller image"
        ) from error
    if tokens:
        more = torch.tensor([list(tokens)], device=device)
        mask = torch.ones(1, length + len(tokens), dtype=torch.bool, device=device)
        positions = torch.arange(length, length + len(tokens), device=device).unsqueeze(0) + offset
        logits = forward(model, more, mask, positions, cache)
    return logits, offset


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
