"""Cron jobs: when they are due, once among workers, at start-up, failing ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.cron import CronJob, cron
from arq.worker import Retry, func
from redis.asyncio import Redis

from sluice.pipeline.queue import ArqWorker
from sluice.pipeline.wire.keys import ARQ_RESULT, ARQ_RUNNING, Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import burst, letters, serving, tally
from tests.roles import eventually

TZ = timezone(timedelta(hours=-3))
MONDAY = datetime(2029, 1, 1, 10, 20, 30, tzinfo=TZ)
_IN_MONTHS = datetime.now(UTC) + timedelta(days=180)
NOT_NOW: dict[str, Any] = {"month": _IN_MONTHS.month, "day": _IN_MONTHS.day}


class Ticks:
    """A cron function that notes its calls."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def job(self, keys: Keys, name: str = "tick", **when: Any) -> CronJob:
        async def tick(ctx: dict[Any, Any]) -> None:
            self.ids.append(ctx["job_id"])

        return cron(tick, name=f"{keys.run}:{name}", **when)


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture(autouse=True)
async def tidy(client: Redis, keys: Keys) -> AsyncIterator[None]:
    yield
    for prefix in (ARQ_RESULT, ARQ_RUNNING):
        for name in await client.keys(f"{prefix}{keys.run}*"):
            await client.delete(name)


async def calls(ticks: Ticks, number: int) -> None:
    async def enough() -> bool:
        return len(ticks.ids) >= number

    await eventually(enough, f"{number} calls of a cron job")


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"second": 40}, MONDAY.replace(second=40)),
        ({"second": 30}, MONDAY.replace(minute=21, second=30)),
        ({"minute": {5, 25, 45}}, MONDAY.replace(minute=25, second=0)),
        ({"hour": 3}, MONDAY.replace(day=2, hour=3, minute=0, second=0)),
        ({"day": 31, "hour": 0, "minute": 0}, MONDAY.replace(day=31, hour=0, minute=0, second=0)),
        ({"weekday": "sun", "hour": 1, "minute": 2}, MONDAY.replace(day=7, hour=1, minute=2, second=0)),
        ({"weekday": 2, "hour": 1, "minute": 2}, MONDAY.replace(day=3, hour=1, minute=2, second=0)),
        ({"month": 3, "day": 1, "hour": 0, "minute": 0}, MONDAY.replace(month=3, hour=0, minute=0, second=0)),
        ({"month": 1, "day": 1, "hour": 9}, MONDAY.replace(year=2030, hour=9, minute=0, second=0)),
    ],
)
async def test_the_next_run_is_worked_out_by_the_worker(
    make_worker: MakeWorker, keys: Keys, ticks: Ticks, when: dict[str, Any], expected: datetime
) -> None:
    worker = make_worker(cron_jobs=[ticks.job(keys, microsecond=250_000, **when)], timezone=TZ)
    await worker.arq.run_cron(MONDAY, 0.5)
    found = worker.arq.cron_jobs[0].next_run
    assert found is not None
    assert found == expected.replace(microsecond=250_000)
    assert found.tzinfo is TZ
    assert await worker.arq.pool.zcard(keys.jobs) == 0


async def test_it_is_enqueued_shortly_before_its_time_and_the_next_one_is_planned(
    make_worker: MakeWorker, keys: Keys, ticks: Ticks
) -> None:
    worker = make_worker(cron_jobs=[ticks.job(keys, second=31, microsecond=0)], timezone=TZ)
    await worker.arq.run_cron(MONDAY, 0.5)
    await worker.arq.run_cron(MONDAY + timedelta(seconds=0.2), 0.5)
    due = MONDAY + timedelta(seconds=1)
    [listed] = await worker.arq.pool.queued_jobs()
    assert listed.job_id == f"{keys.run}:tick:{int(due.timestamp() * 1000)}"
    assert listed.score == int(due.timestamp() * 1000)
    assert worker.arq.cron_jobs[0].next_run == due + timedelta(minutes=1)


async def test_a_worker_that_serves_runs_it_again_and_again(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    worker = make_worker(cron_jobs=[ticks.job(keys, second=set(range(60)), microsecond=0)], timezone=UTC)
    async with serving(worker):
        await calls(ticks, 2)
    assert len(set(ticks.ids)) == len(ticks.ids), "each time has its own id"
    assert worker.arq.jobs_failed == 0


@pytest.mark.parametrize("poll_s", [0.01, 0.5])
async def test_at_startup_means_in_a_burst_too(
    make_worker: MakeWorker, keys: Keys, ticks: Ticks, poll_s: float
) -> None:
    worker = make_worker(cron_jobs=[ticks.job(keys, run_at_startup=True, **NOT_NOW)], settings={"poll_s": poll_s})
    await burst(worker)
    assert len(ticks.ids) == 1
    assert tally(worker) == (1, 0, 0)


async def test_without_it_a_burst_runs_none(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    worker = make_worker(cron_jobs=[ticks.job(keys, **NOT_NOW)], timezone=UTC)
    await burst(worker)
    assert ticks.ids == []
    await worker.arq.heart_beat()
    assert worker.arq.cron_jobs[0].next_run is not None
    assert worker.arq.cron_jobs[0].next_run.tzinfo is not None


async def test_at_startup_while_serving(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    async with serving(make_worker(cron_jobs=[ticks.job(keys, run_at_startup=True, **NOT_NOW)])):
        await calls(ticks, 1)
    assert len(ticks.ids) == 1


async def test_one_time_is_one_call_among_workers(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    """Also when the second worker comes to it after the first one has done it."""
    workers = [make_worker(cron_jobs=[ticks.job(keys, second=31)], name=name, timezone=TZ) for name in ("one", "two")]
    past = MONDAY.replace(year=2001)
    for worker in workers:
        await worker.arq.run_cron(past, 0.5)
        await worker.arq.run_cron(past + timedelta(seconds=1), 0.5)
        worker.arq.cron_jobs[0].next_run = MONDAY.replace(year=2100)  # the burst's own heartbeat is to find nothing due
        await burst(worker)
    assert len(ticks.ids) == 1
    assert sum(worker.arq.jobs_complete for worker in workers) == 1


async def test_two_workers_that_serve_share_each_time(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    def worker(name: str) -> ArqWorker:
        return make_worker(cron_jobs=[ticks.job(keys, second=set(range(60)), microsecond=0)], name=name)

    async with serving(worker("one"), worker("two")):
        await calls(ticks, 3)
    assert len(set(ticks.ids)) == len(ticks.ids)


async def test_not_unique_means_each_worker(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    workers = [make_worker(cron_jobs=[ticks.job(keys, second=31, unique=False)], name=name) for name in ("one", "two")]
    past = MONDAY.replace(year=2001)
    for worker in workers:
        await worker.arq.run_cron(past, 0.5)
        await worker.arq.run_cron(past + timedelta(seconds=1), 0.5)
        worker.arq.cron_jobs[0].next_run = MONDAY.replace(year=2100)  # the burst's own heartbeat is to find nothing due
        await burst(worker)
    assert len(set(ticks.ids)) == 2


async def test_two_schedules_with_one_id_run_once(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    one_id = f"{keys.run}:single"
    jobs = [ticks.job(keys, name, run_at_startup=True, job_id=one_id, **NOT_NOW) for name in ("a", "b")]
    await burst(make_worker(cron_jobs=jobs))
    assert ticks.ids == [one_id]


async def test_one_function_with_two_ids_runs_twice(make_worker: MakeWorker, keys: Keys, ticks: Ticks) -> None:
    ids = [f"{keys.run}:{number}" for number in (1, 2)]
    await burst(make_worker(cron_jobs=[ticks.job(keys, run_at_startup=True, job_id=one, **NOT_NOW) for one in ids]))
    assert sorted(ticks.ids) == ids


async def test_an_id_of_ones_own_is_free_again_within_a_minute(
    make_worker: MakeWorker, keys: Keys, ticks: Ticks, foreign: ArqRedis
) -> None:
    """A schedule with an id must not be held up by the result of its last run."""
    worker = make_worker(cron_jobs=[ticks.job(keys, job_id=f"{keys.run}:single", **NOT_NOW)])
    await foreign.enqueue_job(f"{keys.run}:tick", _job_id=f"{keys.run}:single")
    await burst(worker)
    assert ticks.ids == [f"{keys.run}:single"]
    left = [await foreign.pttl(f"{prefix}{keys.run}:single") for prefix in (ARQ_RESULT, ARQ_RUNNING)]
    assert all(ms == -2 or 0 <= ms <= 60_000 for ms in left)


async def test_a_cron_job_that_fails_is_a_dead_letter_and_is_not_tried_again(
    make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    tries: list[int] = []

    async def breaks(ctx: dict[Any, Any]) -> None:
        tries.append(ctx["job_try"])
        raise ValueError("no disk")

    jobs = [cron(breaks, name=f"{keys.run}:breaks", run_at_startup=True, **NOT_NOW)]
    worker = make_worker(cron_jobs=jobs)
    async with serving(worker):

        async def failed() -> bool:
            return worker.arq.jobs_failed == 1 and bool(await letters(client, keys))

        await eventually(failed, "the failure of a cron job")
    [letter] = (await letters(client, keys)).values()
    assert (tries, letter.reason) == ([1], "failed")
    assert "no disk" in letter.detail
    assert worker.arq.cron_jobs[0].next_run is not None, "its next time stands"


async def test_cron_jobs_have_one_try_unless_told(make_worker: MakeWorker, keys: Keys, client: Redis) -> None:
    tries: dict[str, list[int]] = {"once": [], "twice": []}

    def again(name: str, **options: Any) -> CronJob:
        async def call(ctx: dict[Any, Any]) -> None:
            tries[name].append(ctx["job_try"])
            raise Retry(defer=0.01)

        return cron(call, name=f"{keys.run}:{name}", run_at_startup=True, **NOT_NOW, **options)

    worker = make_worker(cron_jobs=[again("once"), again("twice", max_tries=2)])
    async with serving(worker):

        async def over() -> bool:
            return worker.arq.jobs_failed == 2 and len(await letters(client, keys)) == 2

        await eventually(over, "both cron jobs to run out of tries")
    assert tries == {"once": [1], "twice": [1, 2]}


async def test_cron_and_functions_live_together(
    make_worker: MakeWorker, keys: Keys, ticks: Ticks, foreign: ArqRedis
) -> None:
    async def plain(ctx: dict[Any, Any]) -> int:
        return 1

    worker = make_worker(func(plain, name="plain"), cron_jobs=[ticks.job(keys, run_at_startup=True, **NOT_NOW)])
    job = await foreign.enqueue_job("plain")
    async with serving(worker):
        await calls(ticks, 1)
        assert job is not None
        assert await asyncio.wait_for(job.result(poll_delay=0.01), HANG_S) == 1


def test_only_cron_jobs_are_cron_jobs(make_worker: MakeWorker) -> None:
    with pytest.raises(RuntimeError, match="cron_jobs"):
        make_worker(cron_jobs=["tick"])
