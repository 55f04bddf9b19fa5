"""A decode worker that says when it decoded the first token under each version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from sluice.bench.proximal.work import Ready, Seen
from sluice.pipeline.config import Config
from sluice.pipeline.run.role import role_process
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest, SequenceSoFar
from sluice.workers.job_prompts import JobPrompts


class Observed:
    """A backend that reports every token here; everything else is the backend's own."""

    def __init__(self, backend: Backend, tell: Callable[[Seen], None]) -> None:
        self._backend, self._tell = backend, tell
        self._loop = asyncio.get_running_loop()
        self._newest, self._sequences = backend.version, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """As the backend does it."""
        self._sequences += 1
        try:
            return await self._backend.decode(replace(request, report_every=1, report=self._saw))
        finally:
            self._sequences -= 1

    def _saw(self, so_far: SequenceSoFar) -> None:
        """In the engine's thread."""
        version = so_far.versions[-1]
        if version > self._newest:
            self._newest = version
            self._loop.call_soon_threadsafe(self._tell, Seen(version, time.time(), self._sequences))


async def serve(backend: Backend, config: Config, tell: Callable[[Seen | Ready], None], stop: asyncio.Event) -> None:
    """Serve the run's queue until `stop` is set; what is running then goes back to it."""
    async with role_process(config, "worker", "bench-worker", stop) as role:
        prompts = await asyncio.to_thread(JobPrompts, config.model)
        try:
            worker = DecodeWorker(role, cast("Backend", Observed(backend, tell)), prompts)
            tell(Ready(backend.version))
            await worker.run()
        finally:
            await prompts.close()
