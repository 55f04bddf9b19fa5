"""enqueue_job of a program that knows only arq: ids, arguments, repeats, queues, what is listed."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import Job, SerializationError
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, counts, letters, reaches, serving, tally, until


async def echo(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


async def test_arguments_arrive_and_the_result_comes_back(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("echo", 1, "two", [3.5, None], b=b"raw", deep={"x": [True]})
    worker = make_worker(func(echo, name="echo"))
    await burst(worker)
    assert await answer(job) == [[1, "two", [3.5, None]], {"b": b"raw", "deep": {"x": [True]}}]
    assert tally(worker) == (1, 0, 0)


async def test_a_foreign_program_names_the_queue(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    other = Keys(f"{keys.run}-other")
    here = await foreign.enqueue_job("echo", "here", _queue_name=keys.jobs)
    there = await foreign.enqueue_job("echo", "there", _queue_name=other.jobs)
    mine, theirs = make_worker(func(echo, name="echo")), make_worker(func(echo, name="echo"), on=other)
    await burst(mine)
    assert tally(theirs) == (0, 0, 0)
    assert await answer(here) == [["here"], {}]
    await burst(theirs)
    assert await answer(there) == [["there"], {}]
    assert tally(mine) == tally(theirs) == (1, 0, 0)


async def test_ids_are_random_unless_given(foreign: ArqRedis, keys: Keys) -> None:
    made = [await foreign.enqueue_job("echo") for _ in range(20)]
    assert len({job.job_id for job in made if job}) == 20
    named = await foreign.enqueue_job("echo", _job_id=f"{keys.run}:named")
    assert named is not None
    assert named.job_id == f"{keys.run}:named"


async def test_an_id_under_way_is_refused(foreign: ArqRedis, keys: Keys) -> None:
    assert isinstance(await foreign.enqueue_job("echo", _job_id=f"{keys.run}:a"), Job)
    assert await foreign.enqueue_job("echo", _job_id=f"{keys.run}:a") is None


async def test_of_many_at_once_with_one_id_one_wins(foreign: ArqRedis, keys: Keys) -> None:
    made = await asyncio.gather(*(foreign.enqueue_job("echo", i, _job_id=f"{keys.run}:a") for i in range(10)))
    assert sum(job is not None for job in made) == 1


async def test_an_id_is_refused_while_it_runs_and_while_its_result_is_kept(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    go, started = asyncio.Event(), asyncio.Event()

    async def wait(ctx: dict[Any, Any]) -> None:
        started.set()
        await go.wait()

    job = await foreign.enqueue_job("wait", _job_id=f"{keys.run}:a")
    assert job is not None
    async with serving(make_worker(func(wait, name="wait"))):
        async with asyncio.timeout(HANG_S):
            await started.wait()
        assert await foreign.enqueue_job("wait", _job_id=job.job_id) is None
        go.set()
        await answer(job)
        assert await foreign.enqueue_job("wait", _job_id=job.job_id) is None
        await client.delete(f"arq:result:{job.job_id}")  # as when its time is over
        await answer(await foreign.enqueue_job("wait", _job_id=job.job_id))
    assert (await counts(client, keys))["called"] == 2


async def test_repeats_in_any_order_run_once_each(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    seen: Counter[int] = Counter()

    async def count(ctx: dict[Any, Any], value: int) -> None:
        seen[value] += 1

    pairs = [value for value in range(50) for _ in range(2)]
    await asyncio.gather(*(foreign.enqueue_job("count", v, _job_id=f"{keys.run}:{v}") for v in pairs))
    await burst(make_worker(func(count, name="count")))
    assert seen == Counter(range(50))


async def test_what_is_queued_is_listed_in_order(foreign: ArqRedis, keys: Keys) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    for i, name in enumerate(("first", "second", "third")):
        await foreign.enqueue_job(name, i, key=i, _job_id=f"{keys.run}:{i}", _defer_by=i + 100)
    found = await foreign.queued_jobs()
    assert [(job.function, list(job.args), job.kwargs) for job in found] == [
        ("first", [0], {"key": 0}),
        ("second", [1], {"key": 1}),
        ("third", [2], {"key": 2}),
    ]
    assert [job.job_id for job in found] == [f"{keys.run}:{i}" for i in range(3)]
    assert found[0].score < found[1].score < found[2].score  # type: ignore[operator]
    assert all(before < job.enqueue_time < datetime.now(UTC) for job in found)


async def test_what_runs_is_still_listed(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    go, started = asyncio.Event(), asyncio.Event()

    async def wait(ctx: dict[Any, Any], value: int) -> None:
        started.set()
        await go.wait()

    job = await foreign.enqueue_job("wait", 7)
    async with serving(make_worker(func(wait, name="wait"))):
        async with asyncio.timeout(HANG_S):
            await started.wait()
        [listed] = await foreign.queued_jobs()
        assert (listed.job_id, listed.function, list(listed.args)) == (job and job.job_id, "wait", [7])
        go.set()
        await answer(job)
        assert await foreign.queued_jobs() == []


async def test_a_job_enqueues_another_on_the_same_queue(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def parent(ctx: dict[Any, Any]) -> str:
        return (await ctx["redis"].enqueue_job("echo", "child")).job_id

    job = await foreign.enqueue_job("parent")
    worker = make_worker(func(echo, name="echo"), func(parent, name="parent"))
    await burst(worker)
    child = Job(await answer(job), foreign, foreign.default_queue_name, foreign.job_deserializer)
    assert await answer(child) == [["child"], {}]
    assert tally(worker) == (2, 0, 0)


async def test_an_argument_that_cannot_travel_is_refused_by_the_caller(foreign: ArqRedis, keys: Keys) -> None:
    with pytest.raises(SerializationError, match='unable to serialize job "echo"'):
        await foreign.enqueue_job("echo", object())
    assert await foreign.zcard(keys.jobs) == 0


async def test_a_job_that_ran_out_before_it_was_taken_is_a_dead_letter(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    late = await foreign.enqueue_job("echo", _job_id=f"{keys.run}:late", _expires=0.001)
    good = await foreign.enqueue_job("echo", _job_id=f"{keys.run}:good", _expires=60)
    assert late is not None

    async def gone() -> bool:
        return not await foreign.exists(ARQ_JOB + late.job_id)

    await until(gone, "the payload to run out")
    worker = make_worker(func(echo, name="echo"))
    await burst(worker)
    assert await answer(good) == [[], {}]
    with pytest.raises(Exception, match="expired"):
        await answer(late)
    assert {job_id: letter.reason for job_id, letter in (await letters(client, keys)).items()} == {
        late.job_id: "expired"
    }
    assert tally(worker) == (1, 1, 0), "a job that ran out counts as failed"


async def test_many_ids_without_payload_end_and_the_good_job_is_done(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    await foreign.zadd(keys.jobs, {f"{keys.run}:ghost-{i}": 1 for i in range(100)})
    job = await foreign.enqueue_job("echo")
    worker = make_worker(func(echo, name="echo"))
    await burst(worker)
    assert await answer(job) == [[], {}]
    assert {letter.reason for letter in (await letters(client, keys)).values()} == {"expired"}
    books = await counts(client, keys)
    assert (books["enqueued"], books["dead"], books["called"]) == (100, 100, 1)
    assert tally(worker) == (1, 100, 0), "jobs without payload count as failed"


async def test_the_time_to_live_is_the_callers_until_a_worker_has_the_job(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    """Differs from arq: what a worker has seen is counted, and no eviction or late retry may lose it."""
    tries: list[int] = []
    go = asyncio.Event()

    async def once_more(ctx: dict[Any, Any]) -> None:
        tries.append(ctx["job_try"])
        await go.wait()

    job = await foreign.enqueue_job("once_more", _expires=1000)
    assert job is not None
    assert 990_000 < await foreign.pttl(ARQ_JOB + job.job_id) <= 1_000_000
    day = await foreign.enqueue_job("once_more", _job_id=f"{keys.run}:day", _defer_by=60)
    assert day is not None
    assert 86_400_000 < await foreign.pttl(ARQ_JOB + day.job_id) <= 86_460_000
    async with serving(make_worker(func(once_more, name="once_more"))):
        await reaches(job, status=(await job.status()).in_progress)
        assert await foreign.pttl(ARQ_JOB + job.job_id) == -1
        go.set()
        await answer(job)
    assert tries == [1]
