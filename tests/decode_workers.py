"""A decode worker inside the test's own process, on an engine that is loaded already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sluice.pipeline.config.types import Config
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import Backend
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
