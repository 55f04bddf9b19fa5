"""A sequence decoded again, its weights switching where they did; the entry point `sluice.engines: replay`.

The engine gets the prompt, the seed and the sampling parameters, never the tokens: each part is decoded under its
version up to the position of the next one, and continued under that, as a worker continues a job that was redelivered.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sluice.pipeline.config.types import Config
from sluice.pipeline.images.store import ImageStore
from sluice.pipeline.images.writer import images_of_run
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest

Part = tuple[int, Path, int]
"""A version, its directory, and how many tokens were sampled under it."""
Decode = Callable[[SequenceResult, int, Sequence[Part]], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def open_replay(config: Config) -> AsyncGenerator[Decode]:
    """Decodes results again, by the run's backend, in this process. Raises ModelError, EngineError.

    A call returns token_ids, finish_reason, engine, load_s and decode_s; it raises RequestError, WeightsError.
    """
    began, limits = time.monotonic(), images_of_run(config)
    backend = make_backend(config.model, config.worker, config.rollout_matching.repeat_terminate, limits)
    try:
        await backend.start()
        start_s = time.monotonic() - began
        async with ImageStore(limits) as store:

            async def decode(result: SequenceResult, seed: int, parts: Sequence[Part]) -> dict[str, Any]:
                engine = await backend.for_images() if result.images else backend
                pixels = [await store.get(ref) for ref in result.images]
                so_far, output = SampledTokens(), None
                load_s, decode_s = start_s, 0.0
                for number, (version, directory, count) in enumerate(parts, 1):
                    began = time.monotonic()
                    await engine.load_weights(directory, version)
                    loaded = time.monotonic()
                    most = result.sampling.max_new_tokens
                    until = most if number == len(parts) else min(most, len(so_far) + count)
                    request = SequenceRequest(
                        seq_key=result.seq_id,
                        prompt_token_ids=tuple(result.prompt_token_ids),
                        sampling=replace(result.sampling, max_new_tokens=until),
                        seed=seed,
                        images=tuple(pixels),
                        so_far=so_far if len(so_far) else None,
                    )
                    output = await engine.decode(request)
                    load_s, decode_s = load_s + loaded - began, decode_s + time.monotonic() - loaded
                    so_far = output.sampled
                    if not _was_cut(output, until, most):
                        break
                assert output is not None, "a sequence has a part"
                facts = engine.facts
                return {
                    "token_ids": list(output.token_ids),
                    "finish_reason": output.finish_reason,
                    "engine": f"{facts.name} {facts.engine_version}",
                    "load_s": load_s,
                    "decode_s": decode_s,
                }

            yield decode
    finally:
        await backend.close()


def _was_cut(output: SequenceOutput, until: int, most: int) -> bool:
    """Whether only the end of its part ended it."""
    return output.finish_reason == "length" and len(output.token_ids) == until < most
