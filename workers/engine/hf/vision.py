"""Prompts with images: prepared beside the decode thread, then prefilled in it.

- Decode steps don't wait for images, nor images for decode steps.
- Each (prompt, images) is prepared once while any of its sequences is decoded: the same image objects, not equal ones.
  Other prompts with an image of theirs share what the processor keeps.
- A sequence aborted in the meantime ends as soon as it reaches the decode thread.
- Generated tokens are always looked up in the embedding, even one equal to the image token: after a resume they get a
  separate pass through the model, without the images.
- mRoPE models take positions (3, rows, length); all three are equal for text.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from sluice.pipeline.errors import EngineError, RequestError, SluiceError
from sluice.pipeline.images.features import placed
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf.cache import PrefillCache
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.hf.passes import chosen, forward, forward_scored

_THREADS = 2
_Key = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, identities of the images


def prefill_image(
    model: LoadedModel,
    vision: VisionInputs,
    tokens: Sequence[int],
    cache: Cache,
    first: int | None = None,
    temperature: float = 1.0,
    scored: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Fill the cache with the prompt and the tokens generated so far.

    Returns (logits (1, vocab), logprobs of `tokens[first:]` (1, n), next position - length); `first` None: no logprobs;
    `temperature` applies to these logprobs. Logprobs of the last `scored` tokens of the prompt come before them.
    Raises RequestError if the model rejects the processor's output.
    """
    module, device = model.module, torch.device(model.facts.device)
    assert model.features is not None
    inputs = torch.tensor([vision.token_ids], device=device)
    length = inputs.shape[1]
    types = torch.from_numpy(vision.token_types).to(device)
    try:
        positions, offset = _positions(model, inputs, types, vision)
        images = {**model.features.arguments([vision]), **of_tokens(module, types)}
        logits = forward(
            model, inputs, torch.ones_like(inputs, dtype=torch.bool), positions, cache, keep=1 + scored, **images
        )
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # not necessarily the image's fault: the engine ends, and its jobs are decoded elsewhere
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RequestError(
            f"the model rejects the output of its image processor ({type(error).__name__}: {error}); compare "
            "the processor's files with the model's config.json, or send a smaller image"
        ) from error
    more = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
    known = torch.cat([inputs[:, length - scored :], more[:, :1] if first == 0 else more[:, :0]], dim=1)
    scores = chosen(logits, known, [temperature])
    logits = logits[:, -1]
    if tokens:
        mask = torch.ones(1, length + len(tokens), dtype=torch.bool, device=device)
        positions = torch.arange(length, length + len(tokens), device=device).unsqueeze(0) + offset
        rest = None if first is None or len(tokens) == 1 else max(first, 1)
        logits, others = forward_scored(model, more, mask, positions, cache, rest, [temperature])
        scores = torch.cat([scores, others], dim=1)
    return logits, scores, offset


@torch.inference_mode()
def image_logprobs(
    model: LoadedModel, vision: VisionInputs, tokens: Sequence[int], first: int, temperature: float = 1.0
) -> list[float]:
    """Logprobs (nats, computed in fp32) of tokens `first`.. of a sequence, each given all before it.

    The sequence is `vision`, which ends with its last image, and then `tokens`. Raises RequestError.
    """
    length = len(vision.token_ids)
    if not 1 <= first < length + len(tokens):
        raise ValueError("a token before the first one that is scored is needed, and one to score")
    cache, scored = PrefillCache(model.module.config), max(0, length - first)
    _, scores, _ = prefill_image(model, vision, tokens, cache, max(0, first - length), temperature, scored)
    return scores[0].tolist()


def _positions(
    model: LoadedModel, inputs: torch.Tensor, types: torch.Tensor, vision: VisionInputs
) -> tuple[torch.Tensor, int]:
    """Positions of the prompt, and (next position - length) after it."""
    if model.rope_index is None:
        return torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0), 0
    known = inspect.signature(model.rope_index).parameters
    given: dict[str, Any] = {"mm_token_type_ids": types} if "mm_token_type_ids" in known else {}
    given |= {name: placed(array, model.module, torch) for name, array in vision.named(known).items()}
    positions, delta = model.rope_index(inputs, **given)
    return positions, int(delta)


def of_tokens(module: Any, types: torch.Tensor) -> dict[str, torch.Tensor]:
    """`types` (rows, length; 1: image) under the names by which this model's forward pass takes them."""
    takes = inspect.signature(module.forward).parameters
    return {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in takes}


@dataclass(slots=True, eq=False)
class _Shared:
    future: Future[VisionInputs]
    users: int = 0


class PreparedImages:
    """Calls may come from any event loop."""

    def __init__(self, processor: VisionProcessor) -> None:
        self._processor = processor
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sluice-hf-images")
        self._lock = threading.Lock()
        self._shared: dict[_Key, _Shared] = {}

    @asynccontextmanager
    async def of(self, request: SequenceRequest) -> AsyncIterator[VisionInputs]:
        """The inputs of this request, kept for the duration of the block. Raises RequestError, EngineError."""
        key = (request.prompt_token_ids, tuple(map(id, request.images)))
        shared = self._join(key, request)
        try:
            yield await self._made(shared, request)
        finally:
            with self._lock:
                shared.users -= 1
                if not shared.users:
                    del self._shared[key]
                    shared.future.cancel()

    async def _made(self, shared: _Shared, request: SequenceRequest) -> VisionInputs:
        """Shielded: cancelling one sequence leaves the work to the others."""
        try:
            return await asyncio.shield(asyncio.wrap_future(shared.future))
        except SluiceError:
            raise
        except Exception as error:  # from a third-party processor of this model
            raise RequestError(f"{request.seq_key}: the images cannot be processed: {error!r}") from error

    def close(self) -> None:
        """Take no more work; started work finishes."""
        self._pool.shutdown(wait=False)

    def _join(self, key: _Key, request: SequenceRequest) -> _Shared:
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                try:
                    future = self._pool.submit(self._processor.prepare, request.prompt_token_ids, request.images)
                except RuntimeError as error:
                    raise EngineError("the hf engine is closed") from error
                shared = self._shared[key] = _Shared(future)
            shared.users += 1
            return shared
