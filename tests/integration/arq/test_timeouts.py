"""job_timeout: the worker's and the function's; neighbours go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.queue import JobFailed
from sluice.pipeline.queue.types import Claim
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, letters, serving, tally, until


async def forever(ctx: dict[Any, Any]) -> None:
    await asyncio.Event().wait()


async def short(ctx: dict[Any, Any]) -> str:
    await asyncio.sleep(0.3)
    return "done"


async def test_a_job_over_its_time_is_cancelled_and_failed(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    seen: list[str] = []

    async def tidy(ctx: dict[Any, Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cancelled")

    job = await foreign.enqueue_job("tidy", _job_id=f"{keys.run}:a")
    worker = make_worker(func(tidy, name="tidy"), job_timeout=0.1)
    await burst(worker)
    assert seen == ["cancelled"]
    assert tally(worker) == (0, 1, 0)
    with pytest.raises(JobFailed, match="TimeoutError"):
        await answer(job)
    letter = (await letters(client, keys))[f"{keys.run}:a"]
    assert letter.reason == "failed"
    assert "TimeoutError" in letter.traceback


async def test_a_functions_own_timeout_goes_before_the_workers(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    patient = await foreign.enqueue_job("patient")
    hasty = await foreign.enqueue_job("hasty")
    functions = func(short, name="patient", timeout=HANG_S), func(forever, name="hasty", timeout=0.1)
    worker = make_worker(*functions, job_timeout=0.05)
    await burst(worker)
    assert await answer(patient) == "done"
    with pytest.raises(JobFailed, match="TimeoutError"):
        await answer(hasty)


async def test_a_timeout_touches_no_neighbour(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    bad = await foreign.enqueue_job("forever")
    good = [await foreign.enqueue_job("short") for _ in range(3)]
    worker = make_worker(func(forever, name="forever", timeout=0.05), func(short, name="short"))
    await burst(worker)
    assert [await answer(job) for job in good] == ["done"] * 3
    with pytest.raises(JobFailed):
        await answer(bad)
    assert tally(worker) == (3, 1, 0)


async def test_a_timeout_that_the_job_raises_itself_fails_too(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def gives_up(ctx: dict[Any, Any]) -> None:
        raise TimeoutError("the camera did not answer")

    job = await foreign.enqueue_job("gives_up")
    await burst(make_worker(func(gives_up, name="gives_up")))
    with pytest.raises(JobFailed, match="the camera did not answer"):
        await answer(job)


async def test_a_running_jobs_lease_is_renewed(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """arq's in-progress key outlives the longest timeout; ours is short, and a job may run longer."""
    runs, done = list[int](), asyncio.Event()

    async def long(ctx: dict[Any, Any]) -> int:
        runs.append(ctx["job_try"])
        await done.wait()
        return ctx["job_try"]

    job = await foreign.enqueue_job("long", _job_id=f"{keys.run}:a")
    one, two = (make_worker(func(long, name="long"), name=name) for name in ("one", "two"))
    async with serving(one, two):
        await until(lambda: runs, "the job to run")
        first = await client.zscore(keys.leases, f"{keys.run}:a") or 0.0

        async def renewed() -> bool:
            return (await client.zscore(keys.leases, f"{keys.run}:a") or 0.0) > first

        await until(renewed, "its lease to be renewed")
        done.set()
        assert await answer(job) == 1
    assert runs == [1]


async def test_an_attempt_that_swallows_its_cancellation_takes_no_limit_from_the_next(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """Its lease was lost and its worker has the job again; its late result counts for nothing."""
    stubborn, tries = asyncio.Event(), list[int]()

    async def holds_on(ctx: dict[Any, Any]) -> str:
        tries.append(ctx["job_try"])
        if ctx["job_try"] > 1:
            stubborn.set()
            await asyncio.Event().wait()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await stubborn.wait()
        return "late"

    job = await foreign.enqueue_job("holds_on", _job_id=f"{keys.run}:a")
    worker = make_worker(func(holds_on, name="holds_on"), job_timeout=HANG_S)
    async with serving(worker):
        await until(lambda: tries, "the first attempt")
        worker.arq.job_timeout_s = 0.5
        await worker.leases.queue.release([Claim(job_id=f"{keys.run}:a", attempt=1, enqueued_at=0)])  # loses its lease
        await until(lambda: len(tries) == 2, "the second attempt")
        with pytest.raises(JobFailed, match="TimeoutError"):
            await answer(job)
    assert tries == [1, 2]
    assert "TimeoutError" in (await letters(client, keys))[f"{keys.run}:a"].traceback


async def test_the_time_of_hooks_is_not_the_functions(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def quick(ctx: dict[Any, Any]) -> str:
        return "done"

    async def slow_end(ctx: dict[Any, Any]) -> None:
        await asyncio.sleep(1.0)

    job = await foreign.enqueue_job("quick")
    worker = make_worker(func(quick, name="quick"), job_timeout=0.3, on_job_end=slow_end)
    await burst(worker)
    assert await answer(job) == "done"
    assert tally(worker) == (1, 0, 0)
