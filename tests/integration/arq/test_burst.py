"""Burst mode, run_check and max_jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.worker import FailedJobs, Retry, func

from sluice.pipeline.config.types import BrokerConfig, Config, WorkerConfig
from sluice.pipeline.queue import ArqWorker, arq_pool
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, serving, tally, until


async def nothing(ctx: dict[Any, Any]) -> None:
    pass


async def breaks(ctx: dict[Any, Any]) -> None:
    raise LookupError("no such lamp")


NOTHING, BREAKS = func(nothing, name="nothing"), func(breaks, name="breaks")


async def enqueue(foreign: ArqRedis, name: str, count: int) -> None:
    for _ in range(count):
        await foreign.enqueue_job(name)


async def test_an_empty_queue_ends_a_burst(make_worker: MakeWorker) -> None:
    worker = make_worker(NOTHING)
    await burst(worker)
    assert tally(worker) == (0, 0, 0)


async def test_a_burst_may_be_run_again(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    await enqueue(foreign, "nothing", 25)
    await burst(make_worker(NOTHING))
    worker = make_worker(NOTHING)
    await enqueue(foreign, "nothing", 2)
    await burst(worker)
    assert tally(worker) == (2, 0, 0)


@pytest.mark.parametrize(("most", "left"), [(0, 5), (1, 4), (3, 2), (5, 0), (-1, 0)])
async def test_max_burst_jobs_ends_it_earlier(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, most: int, left: int
) -> None:
    await enqueue(foreign, "nothing", 5)
    worker = make_worker(NOTHING, max_burst_jobs=most)
    await burst(worker)
    assert tally(worker) == (5 - left, 0, 0)
    assert await foreign.zcard(keys.jobs) == left


async def test_what_a_job_enqueues_is_one_more(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    async def parent(ctx: dict[Any, Any]) -> None:
        await ctx["redis"].enqueue_job("nothing")

    await foreign.enqueue_job("parent")
    worker = make_worker(func(parent, name="parent"), NOTHING, max_burst_jobs=1)
    await burst(worker)
    assert tally(worker) == (1, 0, 0)
    [left] = await foreign.queued_jobs()
    assert left.function == "nothing"


async def test_a_retry_counts_towards_max_burst_jobs(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    tries: list[int] = []

    async def again(ctx: dict[Any, Any]) -> None:
        tries.append(ctx["job_try"])
        raise Retry(defer=0.01)

    await foreign.enqueue_job("again")
    worker = make_worker(func(again, name="again"))
    async with asyncio.timeout(HANG_S):
        assert await worker.run_check(max_burst_jobs=1) == 0
    assert tally(worker) == (0, 0, 1)
    assert tries == [1]


async def test_run_check_returns_the_number_done(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    await enqueue(foreign, "nothing", 3)
    async with asyncio.timeout(HANG_S):
        assert await make_worker(NOTHING).run_check() == 3


@pytest.mark.parametrize("count", [1, 2])
async def test_run_check_raises_for_what_failed(foreign: ArqRedis, make_worker: MakeWorker, count: int) -> None:
    await enqueue(foreign, "breaks", count)
    await enqueue(foreign, "nothing", 1)
    with pytest.raises(FailedJobs) as caught:
        async with asyncio.timeout(HANG_S):
            await make_worker(BREAKS, NOTHING).run_check(max_burst_jobs=3)
    assert caught.value.count == count
    mine = [one for one in caught.value.job_results if one.queue_name == foreign.default_queue_name]
    assert len(mine) == count
    assert all("no such lamp" in str(one.result) for one in mine)


async def test_run_check_raises_for_jobs_of_unknown_functions(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    await foreign.enqueue_job("missing")
    with pytest.raises(FailedJobs) as caught:
        async with asyncio.timeout(HANG_S):
            await make_worker(NOTHING).run_check()
    assert caught.value.count == 1


async def test_run_check_raises_for_jobs_without_payload(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    await foreign.zadd(keys.jobs, {f"{keys.run}:ghost": 1})
    with pytest.raises(FailedJobs):
        async with asyncio.timeout(HANG_S):
            await make_worker(NOTHING).run_check()


async def test_no_more_than_max_jobs_run_at_once(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    now, most, go = 0, 0, asyncio.Event()

    async def watch(ctx: dict[Any, Any]) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await go.wait()
        await asyncio.sleep(0)
        now -= 1

    await enqueue(foreign, "watch", 12)
    worker = make_worker(func(watch, name="watch"), max_jobs=4)
    async with serving(worker):
        await until(lambda: now == 4, "four jobs to run")
        last = await foreign.enqueue_job("watch")
        assert await foreign.zcard(foreign.default_queue_name) == 13
        go.set()
        await answer(last)
        await until(lambda: worker.arq.jobs_complete == 13, "all jobs to be done")
    assert most == 4


async def test_two_workers_do_each_job_once(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    done: list[int] = []
    at_work, both = set[str](), asyncio.Event()

    def worker(name: str) -> ArqWorker:
        async def note(ctx: dict[Any, Any], number: int) -> None:
            at_work.add(name)
            if len(at_work) == 2:
                both.set()
            await both.wait()
            done.append(number)

        return make_worker(func(note, name="note"), name=name, max_jobs=5)

    await asyncio.gather(*(foreign.enqueue_job("note", number) for number in range(100)))
    one, two = worker("one"), worker("two")
    await burst(one, two)
    assert sorted(done) == list(range(100))
    assert one.arq.jobs_complete + two.arq.jobs_complete == 100


async def test_a_running_job_is_not_claimed_by_another_worker(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    go = asyncio.Event()
    runs: list[str] = []

    async def wait(ctx: dict[Any, Any]) -> None:
        runs.append(ctx["job_id"])
        await go.wait()

    job = await foreign.enqueue_job("wait")
    assert job is not None
    one, two = (make_worker(func(wait, name="wait"), name=name) for name in ("one", "two"))
    async with serving(one):
        await until(lambda: runs, "the first job to start")
        await foreign.zadd(keys.jobs, {job.job_id: 1})  # what arq's abort does to the score
        async with serving(two):

            async def looked_at() -> bool:
                return await foreign.zscore(keys.jobs, job.job_id) != 1

            await until(looked_at, "the second worker to look at it")
            other = await foreign.enqueue_job("wait")
            await until(lambda: len(runs) == 2, "the other job to start")
            go.set()
            await answer(other)
            await answer(job)
    assert len(runs) == len(set(runs)) == 2


def test_run_makes_a_loops_worth_of_work(broker_config: BrokerConfig, keys: Keys) -> None:
    """Worker.run, as arq's own command calls it: no loop yet, hooks and health record tidied up at the end."""
    from sluice.pipeline.broker import connection

    ended: list[str] = []

    async def end(ctx: dict[Any, Any]) -> None:
        ended.append("shutdown")

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    client = connection.connect(broker_config)
    try:
        loop.run_until_complete(arq_pool(client, keys.jobs).enqueue_job("nothing"))
        config = Config(run=keys.run, broker=broker_config, worker=WorkerConfig(poll_s=0.01))
        options: dict[str, Any] = {"burst": True, "handle_signals": False, "on_shutdown": end}
        worker = ArqWorker([NOTHING], client=client, keys=keys, config=config, **options)
        worker.run()
        assert tally(worker) == (1, 0, 0)
        assert ended == ["shutdown"]
        assert str(worker) == "<Worker j_complete=1 j_failed=0 j_retried=0 j_ongoing=0>"
    finally:
        loop.run_until_complete(client.aclose())
        loop.close()
        asyncio.set_event_loop(None)
