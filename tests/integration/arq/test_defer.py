"""_defer_by and _defer_until: not before their time, then at once."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import JobStatus
from arq.worker import func

from sluice.pipeline.wire.keys import Keys
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, tally


async def when(ctx: dict[Any, Any]) -> float:
    return time.time()


async def test_defer_until_is_the_score(foreign: ArqRedis, keys: Keys) -> None:
    at = datetime(2091, 3, 4, 5, 6, 7, tzinfo=UTC)
    job = await foreign.enqueue_job("when", _defer_until=at)
    assert job is not None
    assert await foreign.zscore(keys.jobs, job.job_id) == at.timestamp() * 1000
    assert await job.status() == JobStatus.deferred


async def test_defer_by_counts_from_now(foreign: ArqRedis, keys: Keys) -> None:
    before = time.time()
    job = await foreign.enqueue_job("when", _defer_by=timedelta(seconds=20))
    assert job is not None
    due = (await foreign.zscore(keys.jobs, job.job_id) or 0) / 1000
    assert before + 19.99 <= due <= time.time() + 20.01


async def test_by_and_until_together_are_refused(foreign: ArqRedis) -> None:
    with pytest.raises(RuntimeError, match="defer_until"):
        await foreign.enqueue_job("when", _defer_by=1, _defer_until=datetime.now(UTC))


@pytest.mark.parametrize("how", ["by", "until"])
async def test_a_deferred_job_waits_and_then_runs(foreign: ArqRedis, make_worker: MakeWorker, how: str) -> None:
    due = time.time() + 0.3
    deferral: dict[str, Any] = {"_defer_by": 0.3}
    if how == "until":
        deferral = {"_defer_until": datetime.fromtimestamp(due, UTC)}
    now = await foreign.enqueue_job("when")
    later = await foreign.enqueue_job("when", **deferral)
    assert later is not None
    status = await later.status()
    assert status == JobStatus.deferred or time.time() >= due
    worker = make_worker(func(when, name="when"))
    await burst(worker)  # a burst waits for deferred jobs too
    first, second = await answer(now), await answer(later)
    assert first < second
    assert second >= due - 0.002
    assert tally(worker) == (2, 0, 0)


async def test_a_time_that_is_over_means_at_once(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("when", _defer_by=-2)
    assert job is not None
    assert await job.status() == JobStatus.queued
    await burst(make_worker(func(when, name="when")))
    assert await answer(job) <= time.time()


async def test_a_deferred_jobs_enqueue_time_is_when_it_was_enqueued(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    seen: list[datetime] = []

    async def look(ctx: dict[Any, Any]) -> None:
        seen.append(ctx["enqueue_time"])

    job = await foreign.enqueue_job("look", _defer_by=0.3)
    assert job is not None
    before = await job.info()
    await burst(make_worker(func(look, name="look")))
    after = await job.result_info()
    assert before is not None
    assert after is not None
    assert seen == [before.enqueue_time]
    assert after.enqueue_time == before.enqueue_time
