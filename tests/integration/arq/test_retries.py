"""Retry, RetryJob, cancellation from inside, max_tries, job_try."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import JobStatus
from arq.worker import FailedJobs, Retry, RetryJob, func
from redis.asyncio import Redis

from sluice.pipeline.queue import JobFailed
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, letters, serving, tally, until


async def twice_again(ctx: dict[Any, Any]) -> int:
    if ctx["job_try"] <= 2:
        raise Retry(defer=0.01)
    return ctx["job_try"]


async def always_again(ctx: dict[Any, Any]) -> None:
    raise Retry(defer=0.01)


async def test_retry_runs_again_with_the_next_try(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("twice_again")
    worker = make_worker(func(twice_again, name="twice_again"))
    await burst(worker)
    assert await answer(job) == 3
    info = await job.result_info() if job else None
    assert info is not None
    assert info.job_try == 3
    assert tally(worker) == (1, 0, 2)


async def test_retry_waits_for_its_delay_and_holds_no_place(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    at: list[float] = []

    async def later(ctx: dict[Any, Any]) -> None:
        at.append(time.time())
        if ctx["job_try"] == 1:
            raise Retry(defer=0.4)

    async def much_later(ctx: dict[Any, Any]) -> None:
        raise Retry(defer=3600)

    async def other(ctx: dict[Any, Any]) -> str:
        return "done"

    await foreign.enqueue_job("later")
    worker = make_worker(
        func(later, name="later"), func(much_later, name="much_later"), func(other, name="other"), max_jobs=1
    )
    async with serving(worker):
        await until(lambda: worker.arq.jobs_complete == 1, "the job to be done")
        waiting = await foreign.enqueue_job("much_later")
        assert waiting is not None
        await until(lambda: worker.arq.jobs_retried == 2, "the other retry")
        assert await answer(await foreign.enqueue_job("other")) == "done"
        assert await waiting.status() == JobStatus.deferred
    assert at[1] - at[0] >= 0.398


async def test_retry_without_delay_runs_again_by_itself(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    """Differs from arq, which retries at once: ours waits a growing, jittered time."""
    at: list[float] = []

    async def again(ctx: dict[Any, Any]) -> None:
        at.append(time.time())
        if len(at) == 1:
            raise Retry

    job = await foreign.enqueue_job("again")
    worker = make_worker(func(again, name="again"))
    await burst(worker)
    await answer(job)
    assert at[1] - at[0] >= 0.24
    assert tally(worker) == (1, 0, 1)


async def test_too_many_tries_are_a_failure_and_a_dead_letter(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    job = await foreign.enqueue_job("always_again", _job_id=f"{keys.run}:a")
    worker = make_worker(func(always_again, name="always_again"))
    await burst(worker)
    assert tally(worker) == (0, 1, 5), "arq's default is five tries"
    with pytest.raises(JobFailed, match="max_tries"):
        await answer(job)
    letter = (await letters(client, keys))[f"{keys.run}:a"]
    assert (letter.reason, "5" in letter.detail) == ("max_tries", True)


@pytest.mark.parametrize(("of_worker", "of_function", "tries"), [(2, None, 2), (5, 1, 1), (1, 3, 3)])
async def test_max_tries_of_the_function_goes_before_the_workers(
    foreign: ArqRedis, make_worker: MakeWorker, of_worker: int, of_function: int | None, tries: int
) -> None:
    await foreign.enqueue_job("again")
    worker = make_worker(func(always_again, name="again", max_tries=of_function), max_tries=of_worker)
    await burst(worker)
    assert tally(worker) == (0, 1, tries)


async def test_without_retries_a_retry_is_a_failure(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("again")
    worker = make_worker(func(always_again, name="again"))
    with pytest.raises(FailedJobs):
        async with asyncio.timeout(HANG_S):
            await worker.run_check(retry_jobs=False)
    assert tally(worker) == (0, 1, 0)
    with pytest.raises(JobFailed, match="Retry defer"):
        await answer(job)


async def test_retry_job_runs_again(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def again(ctx: dict[Any, Any]) -> int:
        if ctx["job_try"] == 1:
            raise RetryJob
        return ctx["job_try"]

    job = await foreign.enqueue_job("again")
    worker = make_worker(func(again, name="again"))
    await burst(worker)
    assert await answer(job) == 2
    assert tally(worker) == (1, 0, 1)


async def test_a_job_that_cancels_itself_runs_again(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    """Within the lease: the worker knows of it and hands the job back."""

    async def again(ctx: dict[Any, Any]) -> int:
        if ctx["job_try"] == 1:
            raise asyncio.CancelledError
        return ctx["job_try"]

    job = await foreign.enqueue_job("again")
    worker = make_worker(func(again, name="again"), settings={"lease_s": 600.0})
    await burst(worker)
    assert await answer(job) == 2
    assert tally(worker) == (1, 0, 1)


async def test_the_first_try_is_one_and_the_caller_may_begin_later(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def which(ctx: dict[Any, Any]) -> int:
        if ctx["job_try"] == 4:
            raise Retry(defer=0.01)
        return ctx["job_try"]

    jobs = [await foreign.enqueue_job("which", _job_try=number) for number in (None, 3, 4)]
    await burst(make_worker(func(which, name="which")))
    assert [await answer(job) for job in jobs] == [1, 3, 5]


async def test_a_job_that_waits_for_its_retry_is_not_taken_by_another(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    async def later(ctx: dict[Any, Any]) -> None:
        raise Retry(defer=600)

    job = await foreign.enqueue_job("later")
    one, two = (make_worker(func(later, name="later"), name=name) for name in ("one", "two"))
    async with serving(one):
        await until(lambda: one.arq.jobs_retried, "the retry")
    other = await foreign.enqueue_job("later")
    assert job is not None
    assert other is not None
    two.arq.max_burst_jobs = 1
    async with serving(two):
        await until(lambda: two.arq.jobs_retried, "the other job's retry")
    assert (tally(one), tally(two)) == ((0, 0, 1), (0, 0, 1))
    assert await job.status() == "deferred"
