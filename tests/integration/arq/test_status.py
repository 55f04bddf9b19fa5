"""Job.status and Job.info from enqueue to end."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import DeserializationError, Job, JobResult, JobStatus
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.queue import Call, Credit, JobQueue
from sluice.pipeline.wire.keys import ARQ_JOB, ARQ_RUNNING, Keys
from tests.factories import decode_job
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, reaches, serving


async def test_a_job_goes_through_all_of_them(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    go = asyncio.Event()

    async def wait(ctx: dict[Any, Any], *args: int, **kwargs: int) -> int:
        await go.wait()
        return 42

    job = Job(f"{keys.run}:a", foreign, keys.jobs, foreign.job_deserializer)
    assert await job.status() == JobStatus.not_found
    assert await job.info() is None
    assert await job.result_info() is None
    await foreign.enqueue_job("wait", 1, 2, c=3, _job_id=job.job_id, _defer_by=3600)
    assert await job.status() == JobStatus.deferred
    await foreign.zadd(keys.jobs, {job.job_id: time.time() * 1000})  # its time has come
    await reaches(job, JobStatus.queued)
    assert await job.result_info() is None
    async with serving(make_worker(func(wait, name="wait"))):
        await reaches(job, JobStatus.in_progress)
        running = await job.info()
        assert running is not None
        assert (running.function, list(running.args), running.kwargs) == ("wait", [1, 2], {"c": 3})
        assert await foreign.exists(ARQ_RUNNING + job.job_id) == 1
        go.set()
        await reaches(job, JobStatus.complete)
    assert await foreign.exists(ARQ_RUNNING + job.job_id) == 0
    done = await job.info()
    assert isinstance(done, JobResult)
    assert (done.function, list(done.args), done.kwargs, done.result) == ("wait", [1, 2], {"c": 3}, 42)
    assert (done.success, done.job_try, done.score) == (True, 1, None)
    assert (done.queue_name, done.job_id) == (keys.jobs, job.job_id)
    assert done.enqueue_time <= done.start_time <= done.finish_time <= datetime.now(UTC)


async def test_info_of_a_queued_job(foreign: ArqRedis) -> None:
    before = time.time()
    job = await foreign.enqueue_job("anything", 123, a=456)
    info = await job.info() if job else None
    assert info is not None
    assert (info.function, list(info.args), info.kwargs, info.job_try) == ("anything", [123], {"a": 456}, None)
    assert abs((info.score or 0) / 1000 - before) < 60
    assert abs(info.enqueue_time - datetime.now(UTC)) < timedelta(seconds=60)


async def test_a_damaged_payload_is_an_error_of_info(foreign: ArqRedis) -> None:
    job = await foreign.enqueue_job("anything")
    assert job is not None
    await foreign.set(ARQ_JOB + job.job_id, b"\x80\x04 a pickle, perhaps")
    with pytest.raises(DeserializationError):
        await job.info()


async def test_a_job_whose_worker_was_stopped_is_queued_again(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    async def wait(ctx: dict[Any, Any]) -> None:
        await asyncio.Event().wait()

    job = await foreign.enqueue_job("wait")
    assert job is not None
    async with serving(make_worker(func(wait, name="wait"), settings={"drain_s": 0.0})):
        await reaches(job, JobStatus.in_progress)
    assert await job.status() == JobStatus.queued


async def test_jobs_of_ours_look_like_arqs(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """What JobQueue enqueued is a job for arq's client too: a call, a deferred one, one of high priority."""

    async def add(ctx: dict[Any, Any], a: int, b: int) -> int:
        return a + b

    queue = JobQueue(client, keys)
    calls = [
        Call(job_id=f"{keys.run}:now", function="add", args=(1,), kwargs={"b": 2}),
        Call(job_id=f"{keys.run}:later", function="add", args=(3, 4), defer_s=3600),
        Call(job_id=f"{keys.run}:first", function="add", args=(5, 6), priority=3),
    ]
    assert await queue.enqueue_calls(calls) == ["enqueued"] * 3
    jobs = [Job(call.job_id, foreign, keys.jobs, foreign.job_deserializer) for call in calls]
    assert [await job.status() for job in jobs] == [JobStatus.queued, JobStatus.deferred, JobStatus.queued]
    assert [one.job_id for one in await foreign.queued_jobs()] == [jobs[i].job_id for i in (2, 0, 1)]
    assert await foreign.enqueue_job("add", 0, 0, _job_id=jobs[0].job_id) is None
    await client.zadd(keys.jobs, {jobs[1].job_id: time.time() * 1000})  # its time has come
    async with serving(make_worker(func(add, name="add"))):
        assert [await answer(job) for job in jobs] == [3, 7, 11]
    assert await queue.enqueue_calls(calls) == ["done"] * 3


async def test_the_times_of_our_decode_jobs_are_true(foreign: ArqRedis, keys: Keys, client: Redis) -> None:
    outcome = await JobQueue(client, keys).enqueue([decode_job(f"{keys.run}:a")], Credit(10, 10, 1))
    assert outcome == ["enqueued"]
    info = await Job(f"{keys.run}:a", foreign, keys.jobs, foreign.job_deserializer).info()
    assert info is not None
    assert info.function == "decode"
    assert abs(info.enqueue_time - datetime.now(UTC)) < timedelta(seconds=60)
