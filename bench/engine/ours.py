"""Our backends, by the one call that a worker makes for each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sluice.bench.engine.load import Ask
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceRequest


class Ours:
    """One of the sides: a backend that decodes up to `max_batch` sequences at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runner = asyncio.Runner()
        self._runner.run(backend.start())

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The new tokens of each sequence."""
        return self._runner.run(self._decode(asks))

    def close(self) -> None:
        """End the engine."""
        self._runner.run(self._backend.close())
        self._runner.close()

    async def _decode(self, asks: Sequence[Ask]) -> list[list[int]]:
        outputs = await asyncio.gather(*(self._backend.decode(request_of(*each)) for each in enumerate(asks)))
        return [output.token_ids for output in outputs]


def request_of(index: int, ask: Ask) -> SequenceRequest:
    """Greedy, of exactly the asked length unless the model ends it."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=ask.num_new_tokens)
    return SequenceRequest(str(index), ask.prompt, sampling)


def hf_backend(model: Path, max_batch: int) -> Backend:
    """Not started."""
    from sluice.workers.engine.hf import HfBackend

    return HfBackend(ModelConfig(path=str(model), dtype="float32"), max_batch=max_batch)


def vllm_backend(model: Path, max_batch: int) -> Backend:
    """Not started."""
    from sluice.pipeline.config.types import VllmEngineOptions
    from sluice.workers.engine.vllm import VllmBackend

    options = VllmEngineOptions(enforce_eager=enforce_eager())
    return VllmBackend(ModelConfig(path=str(model), dtype="float32"), max_batch=max_batch, options=options)


def enforce_eager() -> bool:
    """For both sides of vLLM: on a CPU, compiling takes longer than the run."""
    import torch

    return not torch.cuda.is_available()
