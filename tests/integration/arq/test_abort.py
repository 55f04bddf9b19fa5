"""arq's Job.abort: before the start, deferred, while it runs, after its end, unknown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import Job, JobStatus
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.wire.keys import ARQ_ABORT, Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, counts, letters, reaches, serving, tally, until


class Long:
    """A job that runs until it is cancelled, or let go."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()

    async def __call__(self, ctx: dict[Any, Any]) -> str:
        self.started.append(ctx["job_id"])
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ctx["job_id"])
            raise
        return "done"


@pytest.fixture
def long() -> Long:
    return Long()


def named(long: Long) -> Any:
    async def call(ctx: dict[Any, Any]) -> str:
        return await long(ctx)

    return func(call, name="long")


async def made(foreign: ArqRedis, name: str, keys: Keys, **options: Any) -> Job:
    job = await foreign.enqueue_job("long", _job_id=f"{keys.run}:{name}", **options)
    assert job is not None
    return job


async def begun(long: Long, job: Job) -> None:
    await until(lambda: job.job_id in long.started, f"job {job.job_id} to start")


async def abort(job: Job) -> bool:
    return await job.abort(timeout=HANG_S, poll_delay=0.01)


async def test_a_running_job_is_cancelled_and_its_neighbours_go_on(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, long: Long
) -> None:
    jobs = [await made(foreign, name, keys) for name in "abc"]
    worker = make_worker(named(long))
    async with serving(worker):
        for job in jobs:
            await begun(long, job)
        assert await abort(jobs[1]) is True
        assert await jobs[1].status() == JobStatus.complete
        assert await jobs[0].status() == await jobs[2].status() == JobStatus.in_progress
        long.go.set()
        assert [await answer(jobs[i]) for i in (0, 2)] == ["done", "done"]
    assert long.cancelled == [jobs[1].job_id]
    assert tally(worker) == (2, 1, 0)
    books = await counts(client, keys)
    assert (books["dropped"], books["called"], books.get("dead", 0)) == (1, 2, 0)
    assert books["bytes"] == 0
    assert await letters(client, keys) == {}, "an aborted job is no dead letter"
    with pytest.raises(asyncio.CancelledError):
        await answer(jobs[1])
    assert await foreign.zscore(ARQ_ABORT, jobs[1].job_id) is None


@pytest.mark.parametrize("defer_s", [0, 86_400])
async def test_a_job_is_aborted_before_it_starts(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long, defer_s: int
) -> None:
    job = await made(foreign, "a", keys, _defer_by=defer_s)
    with pytest.raises(asyncio.TimeoutError):
        await job.abort(timeout=0)
    worker = make_worker(named(long))
    await burst(worker)
    with pytest.raises(asyncio.CancelledError):
        await answer(job)
    assert long.started == []
    assert await foreign.zscore(ARQ_ABORT, job.job_id) is None
    assert tally(worker) == (0, 1, 0), "an abort before the start counts as failed"


async def test_a_deferred_job_is_aborted_while_a_worker_serves(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    job = await made(foreign, "a", keys, _defer_by=3600)
    async with serving(make_worker(named(long))):
        assert await job.status() == JobStatus.deferred
        assert await abort(job) is True
        assert await job.status() == JobStatus.complete
    assert long.started == long.cancelled, "arq makes it ready before it says abort: it may have begun"


async def test_a_job_that_is_over_cannot_be_aborted(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    long.go.set()
    job = await made(foreign, "a", keys)
    worker = make_worker(named(long))
    async with serving(worker):
        assert await answer(job) == "done"
        assert await abort(job) is False
        assert await answer(job) == "done", "its result stays"

        async def forgotten() -> bool:
            return await foreign.zscore(ARQ_ABORT, job.job_id) is None

        await until(forgotten, "the abort to be taken off the list")
    assert tally(worker) == (1, 0, 0)


async def test_an_unknown_id_cannot_be_aborted(foreign: ArqRedis, keys: Keys) -> None:
    job = Job(f"{keys.run}:nobody", foreign, keys.jobs, foreign.job_deserializer)
    assert await abort(job) is False
    await foreign.zrem(ARQ_ABORT, job.job_id)


async def test_ids_that_nobody_knows_hide_no_abort(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    """arq's set of aborts is one for the whole server; what other programs left there is not ours."""
    strangers = {f"{keys.run}:stranger-{i}": i + 1 for i in range(1500)}
    await foreign.zadd(ARQ_ABORT, strangers)
    job = await made(foreign, "a", keys)
    try:
        async with serving(make_worker(named(long))):
            await begun(long, job)
            assert await abort(job) is True
    finally:
        await foreign.zrem(ARQ_ABORT, *strangers)
    assert long.cancelled == [job.job_id]


async def test_an_abort_makes_room_in_a_full_worker(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    first, second = await made(foreign, "a", keys), await made(foreign, "b", keys, _defer_by=0.01)
    async with serving(make_worker(named(long), max_jobs=1)):
        await begun(long, first)
        await reaches(second, JobStatus.queued)
        assert await abort(first) is True
        await begun(long, second)
        assert long.started == [first.job_id, second.job_id]
        long.go.set()
        assert await answer(second) == "done"


async def test_the_id_of_an_aborted_job_is_taken_while_its_result_is_kept(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    job = await made(foreign, "a", keys)
    async with serving(make_worker(named(long))):
        await begun(long, job)
        assert await abort(job) is True
        assert await foreign.enqueue_job("long", _job_id=job.job_id) is None


async def test_the_worker_that_has_the_job_ends_it_whichever_sees_the_abort(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long
) -> None:
    job = await made(foreign, "a", keys)
    one, two = make_worker(named(long), name="one"), make_worker(named(long), name="two")
    async with serving(one):
        await begun(long, job)
        async with serving(two):
            assert await abort(job) is True

            await until(lambda: long.cancelled, "the job to be cancelled")
    assert (tally(one), tally(two)) == ((0, 1, 0), (0, 0, 0))


async def test_aborts_need_no_option(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, long: Long) -> None:
    """Differs from arq, whose workers ignore an abort unless told `allow_abort_jobs`."""
    job = await made(foreign, "a", keys)
    async with serving(make_worker(named(long), allow_abort_jobs=False)):
        await begun(long, job)
        assert await abort(job) is True
