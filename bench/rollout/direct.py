"""The engine of a worker, called directly in this process: no queue, no server, no text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend, SequenceRequest, SequenceSoFar


class Direct:
    """Greedy sequences of a backend that has started."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._calls = backend, 0

    async def decode(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` new tokens. Raises SluiceError where the model ends it earlier."""
        found = (await self._backend.decode(self._request(prompt, num_tokens))).token_ids
        if len(found) != num_tokens:
            raise SluiceError(f"the engine gave {len(found)} tokens, and {num_tokens} were asked for")
        return found

    async def first_tokens_s(self, prompt: Sequence[int], num_tokens: int, every: int) -> float:
        """Seconds to its first `every` tokens; it is decoded to its end."""
        began, reports = time.perf_counter(), list[float]()

        def report(_: SequenceSoFar) -> None:
            reports.append(time.perf_counter() - began)

        request = self._request(prompt, num_tokens)
        await self._backend.decode(replace(request, report_every=every, report=report))
        return reports[0]

    def _request(self, prompt: Sequence[int], num_tokens: int) -> SequenceRequest:
        self._calls += 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens)
        return SequenceRequest(f"direct-{self._calls}:0", tuple(prompt), sampling)


@contextlib.asynccontextmanager
async def direct_engine(settings: Sequence[str]) -> AsyncIterator[Direct]:
    """Loaded with the settings of a run; it ends with the block."""
    config = load_config(None, list(settings), {})
    backend = make_backend(config.model, config.worker)
    await backend.start()
    try:
        yield Direct(backend)
    finally:
        await backend.close()
