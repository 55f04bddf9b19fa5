"""Our engines in a benchmark's process: made, loaded, asked for sequences, closed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sluice.bench.processes import enforce_eager
from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceRequest

B = TypeVar("B", bound=Backend)

PROMPT_IDS = 256  # the byte tokens


def make_engine(
    name: str, model: Path, max_batch: int, repeat_terminate: RepeatTerminateConfig | None = None, **more: Any
) -> Backend:
    """One of our backends, not started; in float32 unless `more`, of its ModelConfig, says otherwise."""
    settings = ModelConfig(path=str(model), **{"dtype": "float32", **more})
    if name == "hf":
        from sluice.workers.engine.hf import HfBackend

        return HfBackend(settings, max_batch=max_batch, repeat_terminate=repeat_terminate, second_copy_gb=None)
    from sluice.workers.engine.vllm import VllmBackend

    options = VllmEngineOptions(enforce_eager=enforce_eager())
    return VllmBackend(
        settings, max_batch=max_batch, options=options, repeat_terminate=repeat_terminate, max_pause_s=1.0
    )


@contextlib.asynccontextmanager
async def loaded(backend: B) -> AsyncGenerator[B]:
    """Started, and closed after the block."""
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


def greedy(
    key: Any, prompt: Sequence[int], num_new_tokens: int, *, logprobs: bool = True, **more: Any
) -> SequenceRequest:
    """A sequence of so many new tokens, unless it ends by itself; `more`: of its SequenceRequest."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_new_tokens, logprobs=logprobs)
    return SequenceRequest(str(key), tuple(prompt), sampling, **more)


def random_ids(chance: random.Random, count: int) -> list[int]:
    """Tokens of a prompt that no engine has seen."""
    return [chance.randrange(PROMPT_IDS) for _ in range(count)]
