"""Prompts with images: whether vLLM takes them for this model, and how vLLM's own processor expands them.

- What to request is decided before vLLM starts: images, or the language model alone; never silently the latter.
- vLLM identifies images by a hash of their pixels in its caches (processed images, encoded ones, prefixes).
- A processed image is sent whole with every request: if one is refused or aborted in between, the two halves of vLLM's
  shared image cache still agree.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import transformers

from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.images.processor import (
    CACHE_BYTES,
    VisionProcessor,
    check_placeholders,
    load_processor,
    pixel_budget,
)
from sluice.pipeline.images.store import BYTES_PER_PIXEL
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.model_files import has_vision

_Key = tuple[tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Vision:
    """What to request for a model with a vision part."""

    arguments: dict[str, Any]  # of vLLM's engine
    image_token: str = ""  # "": the language model alone
    image_token_id: int = -1
    processor: VisionProcessor | None = None  # ours: finds what was expanded before
    processed: ProcessedPrompts = field(default_factory=lambda: ProcessedPrompts(), compare=False)
    off: str = ""  # why images aren't taken; "" if they are

    @classmethod
    def of(cls, model: ModelConfig, options: VllmEngineOptions, max_images: int) -> Vision | None:
        """None for a model without a vision part; `max_images` of one prompt.

        Raises ModelError for an unusable processor, or a pixel budget it would ignore.
        """
        if not _has_vision(model):
            return None
        arguments: dict[str, Any] = {"skip_tokenizer_init": False}
        if off := _off(model, options):
            if "language_model_only" not in options.extra:
                arguments["language_model_only"] = True
            return cls(arguments, off=off)
        processor = load_processor(model.path, transformers, trust_remote_code=model.trust_remote_code)
        if budget := pixel_budget(processor.image_processor, model.preprocess):
            arguments["mm_processor_kwargs"] = budget
        if "limit_mm_per_prompt" not in options.extra:
            arguments["limit_mm_per_prompt"] = {"image": max_images, "video": 0, "audio": 0}
        ours = VisionProcessor(processor, model.preprocess)
        return cls(arguments, processor.image_token, ours.image_token_id, ours)

    def hint(self, options: VllmEngineOptions) -> str:
        """What to do if vLLM can't run the model; "" if the reason is unknown."""
        if importlib.util.find_spec("torchvision") is not None:
            return ""
        if "model_impl" in options.extra:
            return "; vLLM's processors of most vision-language models need the package torchvision: install it"
        return (
            "; vLLM's own vision-language models need the package torchvision: install it, or set "
            "worker.vllm.extra.model_impl: transformers"
        )

    async def expand(self, llm: Any, request: SequenceRequest) -> Any:
        """`vllm.inputs.MultiModalInput` of this request, processed off the event loop. Raises RequestError."""
        try:
            return await self.processed.of(request, lambda: self._process(llm, request))
        except RequestError as error:
            raise RequestError(f"{request.seq_key}: {error}") from error

    async def _process(self, llm: Any, request: SequenceRequest) -> Any:
        images, ids = list(request.images), request.prompt_token_ids
        if self.processor is not None and ids.count(self.image_token_id) > len(images):
            ids = tuple(await asyncio.to_thread(self.processor.collapse, ids, images))
        check_placeholders(ids.count(self.image_token_id), len(images), self.image_token)
        prompt = {"prompt_token_ids": list(ids), "multi_modal_data": {"image": images}}
        try:
            return await llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
            cause = error.__cause__ or error  # vLLM's own message contains the whole images
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            what = f"the image ({sizes})" if len(images) == 1 else f"the {len(images)} images ({sizes})"
            raise RequestError(f"{what} cannot be processed: {type(cause).__name__}: {cause}") from error


class ProcessedPrompts:
    """What vLLM's processor made of prompts with images, for all sequences of a group; used on one event loop.

    Bounded by bytes, least recently used first; `processed` counts the images that went through the processor.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._making: dict[_Key, asyncio.Task[Any]] = {}
        # With the images whose identity is part of the key.
        self._made: OrderedDict[_Key, tuple[Any, int, list[Any]]] = OrderedDict()
        self.processed = 0

    async def of(self, request: SequenceRequest, process: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The prompt of this request, made by `process` unless it is here. Raises what `process` raises."""
        key = request.prompt_token_ids, tuple(image.info.get("sha256") or id(image) for image in request.images)
        if (kept := self._made.get(key)) is not None:
            self._made.move_to_end(key)
            return kept[0]
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(key, request.images, process))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # callers may have given up
        # Shielded: cancelling one sequence leaves the work to the others.
        return await asyncio.shield(task)

    async def _make(self, key: _Key, images: tuple[Any, ...], process: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            prompt = await process()
        finally:
            del self._making[key]
        self.processed += len(images)
        kept = [image for image in images if not image.info.get("sha256")]
        num_bytes = _num_bytes(prompt) + sum(BYTES_PER_PIXEL * image.width * image.height for image in kept)
        self._made[key] = prompt, num_bytes, kept
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, dropped, _) = self._made.popitem(last=False)
            self._num_bytes -= dropped
        return prompt


def _num_bytes(prompt: Any) -> int:
    """Of the processor's tensors."""
    items = [item for some in prompt.get("mm_kwargs", {}).values() for item in some if item is not None]
    return sum(_leaf_bytes(element.data) for item in items for element in item.values())


def _leaf_bytes(data: Any) -> int:
    """Of one tensor, or of all in a nested list."""
    return sum(map(_leaf_bytes, data)) if isinstance(data, list | tuple) else getattr(data, "nbytes", 0)


def _has_vision(model: ModelConfig) -> bool:
    """Whether transformers knows this as a vision model. Raises ModelError if vision is required but missing."""
    try:
        found: Any = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError):
        found = None  # vLLM knows models that transformers doesn't, and reports what is wrong with this one
    return has_vision(model, found)


def _off(model: ModelConfig, options: VllmEngineOptions) -> str:
    """Why only text is requested. Raises ModelError if the options contradict each other."""
    limit = options.extra.get("limit_mm_per_prompt", {}).get("image", 1)
    count = limit.get("count") if isinstance(limit, dict) else limit
    reasons = {
        "model.variant is text": model.variant == "text",
        "worker.vllm.extra.language_model_only is set": bool(options.extra.get("language_model_only")),
        "worker.vllm.extra.limit_mm_per_prompt allows no image": count == 0,
    }
    off = next((reason for reason, holds in reasons.items() if holds), "")
    if off and model.variant == "vlm":
        raise ModelError(f"{model.path}: model.variant is vlm, but {off}; change one of them")
    return off
