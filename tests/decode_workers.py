"""A decode worker inside the test's own process, on an engine that is loaded already."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from sluice.pipeline.config.types import Config
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import Backend
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.hf.backend import DecodeThread
from sluice.workers.engine.hf.decoder import Decoder
from sluice.workers.job_prompts import JobPrompts
from tests.deadlines import HANG_S
from tests.roles import role_of


@contextlib.asynccontextmanager
async def working(config: Config, backend: Backend, name: str = "w") -> AsyncIterator[DecodeWorker]:
    """It serves until the block ends."""
    async with role_of(config, "worker", name) as role:
        worker = DecodeWorker(role, backend, JobPrompts(config.model))
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            role.stop.set()
            async with asyncio.timeout(HANG_S):
                await running


def hold_steps(monkeypatch: pytest.MonkeyPatch, backend: HfBackend, until: Callable[[DecodeThread], object]) -> None:
    """The engine makes one step over what it runs, and no other before this holds: nothing long ends earlier."""
    thread, serve = backend._thread, backend._thread._serve

    def hold(decoder: Decoder) -> None:
        serve(decoder)
        deadline = time.monotonic() + HANG_S
        while decoder.rows and not until(thread) and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(thread, "_serve", hold)
