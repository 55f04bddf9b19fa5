"""One loaded model in this process, one sequence per call; the entry point `sluice.engines: local`.

For inspecting a model without a queue. Tokens are the same that a worker samples from the same prompt, sampling and
seed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from sluice.pipeline.config.types import ImagesConfig, ModelConfig, WorkerConfig
from sluice.pipeline.images.store import ImageStore
from sluice.pipeline.wire.messages import ImageRef, SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.engine.backends import RoutedBackend, make_backend
from sluice.workers.engine.contracts import SequenceRequest


class LocalEngine:
    """A started backend, and the images it may read."""

    def __init__(self, backend: RoutedBackend, images: ImageStore) -> None:
        self._backend, self._images = backend, images

    async def decode(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int, images: Sequence[ImageRef] = ()
    ) -> SequenceResult:
        """Decodes up to the context length; the prompt has one placeholder for each image.

        Raises RequestError if the prompt leaves no room or an image can't be used, EngineError.
        """
        facts = (await self._backend.for_images()).facts if images else self._backend.facts
        pixels = [await self._images.get(ref) for ref in images]
        request = SequenceRequest(
            seq_key=secrets.token_hex(8),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            seed=seed,
            images=tuple(pixels),
        )
        length = len(prompt_token_ids)
        if images:  # the engine alone knows how many tokens they become, and says so with the first token
            first = await self._backend.decode(_up_to(request, 1))
            request, length = replace(request, so_far=first.sampled), len(first.prompt_token_ids)
        request = _up_to(request, facts.context_length - length)
        output = await self._backend.decode(request)
        return SequenceResult(
            seq_id=request.seq_key,
            group_id=request.seq_key,
            group_size=1,
            index=0,
            backend=facts.name,
            engine_version=facts.engine_version,
            prompt_token_ids=TokenArray(output.prompt_token_ids),
            **output.sampled.columns(),
            ranked=output.sampled.as_ranked(),
            prompt_ranked=output.prompt_ranked,
            text=output.text,
            raw_text=output.raw_text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            sampling=request.sampling,
            images=[
                msgspec.structs.replace(ref, sha256=image.info["sha256"])
                for ref, image in zip(images, pixels, strict=True)
            ],
        )


def _up_to(request: SequenceRequest, tokens: int) -> SequenceRequest:
    most = max(1, min(request.sampling.max_new_tokens, tokens))  # without room for one, the engine refuses the prompt
    return replace(request, sampling=msgspec.structs.replace(request.sampling, max_new_tokens=most))


@asynccontextmanager
async def open_engine(
    model: ModelConfig, worker: WorkerConfig, images: ImagesConfig | None = None
) -> AsyncIterator[LocalEngine]:
    """The model on the configured backend, for the duration of the block. Raises ModelError, EngineError."""
    limits = images or ImagesConfig()
    backend = make_backend(model, worker, images=limits)
    try:
        async with ImageStore(limits) as store:
            await backend.start()
            yield LocalEngine(backend, store)
    finally:
        await backend.close()
