"""What the tests of arq's behaviour share: running a worker with a deadline, and reading how jobs ended."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from arq.jobs import Job, JobStatus

from sluice.pipeline.queue import ArqWorker
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.deadlines import HANG_S
from tests.roles import eventually


async def burst(*workers: ArqWorker) -> None:
    """Until the queue is empty, for all of them."""
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(worker.main() for worker in workers))


@contextlib.asynccontextmanager
async def serving(*workers: ArqWorker) -> AsyncIterator[None]:
    """The workers serve until the block ends."""
    tasks = []
    for worker in workers:
        worker.arq.burst = False
        tasks.append(asyncio.create_task(worker.main()))
    try:
        yield
    finally:
        for worker in workers:
            worker.stop.set()
            worker.wake.set()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*tasks)


def tally(worker: ArqWorker) -> tuple[int, int, int]:
    """Jobs complete, failed, retried."""
    return worker.arq.jobs_complete, worker.arq.jobs_failed, worker.arq.jobs_retried


async def answer(job: Job | None) -> Any:
    """arq's own wait for a result."""
    assert job is not None
    return await job.result(timeout=HANG_S, poll_delay=0.01)


async def until(holds: Callable[[], Any], cause: str) -> None:
    """Until it is so; `holds` may be a coroutine function."""

    async def is_so() -> bool:
        value = holds()
        return bool(await value if inspect.isawaitable(value) else value)

    await eventually(is_so, cause, HANG_S)


async def reaches(job: Job, status: JobStatus) -> None:
    """Until arq says so."""

    async def is_so() -> bool:
        return await job.status() == status

    await eventually(is_so, f"job {job.job_id} to be {status.value}")


async def letters(client: Any, keys: Keys) -> dict[str, DeadLetter]:
    """Dead letters by job id; a job of a call has one."""
    rows = await client.xrange(keys.dead)
    return {fields[b"g"].decode(): decode(DeadLetter, fields[b"d"]) for _, fields in rows}


async def counts(client: Any, keys: Keys) -> dict[str, int]:
    """The run's books."""
    return {name.decode(): int(value) for name, value in (await client.hgetall(keys.counts)).items()}
