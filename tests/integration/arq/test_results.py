"""What a caller gets back: values, failures, timeouts, nothing, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import DeserializationError, Job, ResultNotFound, SerializationError
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.queue import JobFailed
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_RESULT, Keys
from tests.counters import reached
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, counts, letters, tally


async def add(ctx: dict[Any, Any], a: int, b: int) -> int:
    return a + b


async def breaks(ctx: dict[Any, Any]) -> None:
    raise LookupError("no such lamp")


async def odd(ctx: dict[Any, Any]) -> Any:
    return object()


async def test_a_result_may_be_asked_for_again(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("add", 1, 2)
    await burst(make_worker(func(add, name="add")))
    assert [await answer(job), await answer(job)] == [3, 3]


@pytest.mark.parametrize("value", [None, False, 0, "", b"\x00\xff", [], {}, 1.5, 2**63, {"a": [{"b": None}]}])
async def test_values_come_back_as_they_are(foreign: ArqRedis, make_worker: MakeWorker, value: Any) -> None:
    async def give(ctx: dict[Any, Any]) -> Any:
        return value

    job = await foreign.enqueue_job("give")
    await burst(make_worker(func(give, name="give")))
    got = await answer(job)
    assert (type(got), got) == (type(value), value)


async def test_an_exception_is_raised_at_the_caller_and_is_a_dead_letter(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """Differs from arq: one type with the original's name and words, since nothing is pickled; and a dead letter."""
    job = await foreign.enqueue_job("breaks", _job_id=f"{keys.run}:a")
    worker = make_worker(func(breaks, name="breaks"))
    await burst(worker)
    with pytest.raises(JobFailed, match=r"LookupError.*no such lamp"):
        await answer(job)
    info = await job.result_info() if job else None
    assert info is not None
    assert (info.success, info.function, info.job_try) == (False, "breaks", 1)
    letter = (await letters(client, keys))[f"{keys.run}:a"]
    assert (letter.reason, letter.attempts, letter.worker) == ("failed", 1, "w")
    assert "no such lamp" in letter.detail
    assert 'raise LookupError("no such lamp")' in letter.traceback
    assert tally(worker) == (0, 1, 0)
    [(_, row)] = await client.xrange(keys.dead)
    assert row[b"p"], "with the payload, for a replay"
    assert (await counts(client, keys))["dead:failed"] == 1


async def test_an_exception_as_value_is_a_success(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    """Differs from arq: it arrives as its name and words."""

    async def give(ctx: dict[Any, Any]) -> Any:
        return TypeError("xxx")

    job = await foreign.enqueue_job("give")
    worker = make_worker(func(give, name="give"))
    await burst(worker)
    assert await answer(job) == {"error": "TypeError", "message": "xxx"}
    assert tally(worker) == (1, 0, 0)


async def test_a_result_that_cannot_travel_says_so_and_harms_nobody(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    bad, good = await foreign.enqueue_job("odd"), await foreign.enqueue_job("add", 2, 2)
    await burst(make_worker(func(odd, name="odd"), func(add, name="add")))
    with pytest.raises(SerializationError, match="unable to serialize result"):
        await answer(bad)
    assert await answer(good) == 4
    assert await foreign.zcard(keys.jobs) == 0


async def test_a_wait_for_a_result_times_out(foreign: ArqRedis) -> None:
    job = await foreign.enqueue_job("add", 1, 2)
    assert job is not None
    with pytest.raises(asyncio.TimeoutError):
        await job.result(timeout=0.05, poll_delay=0.01)


async def test_an_unknown_job_has_no_result(foreign: ArqRedis, keys: Keys) -> None:
    with pytest.raises(ResultNotFound):
        await Job(f"{keys.run}:nobody", foreign, keys.jobs).result()


async def test_a_caller_that_waits_is_answered(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("add", 1, 2)
    waiting = asyncio.create_task(answer(job))
    await burst(make_worker(func(add, name="add")))
    assert await waiting == 3


async def test_without_kept_results_a_caller_that_waits_is_told(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("add", 1, 2)
    waiting = asyncio.create_task(answer(job))
    await burst(make_worker(func(add, name="add"), keep_result=0))
    with pytest.raises(ResultNotFound):
        await waiting
    assert job is not None
    assert await foreign.enqueue_job("add", 1, 2, _job_id=job.job_id) is not None, "and its id is free"


async def ttl_ms(foreign: ArqRedis, make_worker: MakeWorker, of_function: dict[str, Any], **of_worker: Any) -> int:
    """Time to live of a result, ms; -1 for ever, -2 not kept."""
    job = await foreign.enqueue_job("add", 1, 2)
    assert job is not None
    await burst(make_worker(func(add, name="add", **of_function), **of_worker))
    left = await foreign.pttl(ARQ_RESULT + job.job_id)
    await foreign.delete(ARQ_RESULT + job.job_id)
    return left


async def test_results_are_kept_for_an_hour_unless_told(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    assert 3_500_000 < await ttl_ms(foreign, make_worker, {}) <= 3_600_000
    assert 7_100_000 < await ttl_ms(foreign, make_worker, {}, keep_result=7200.25) <= 7_200_250
    assert 500_000 < await ttl_ms(foreign, make_worker, {}, settings={"keep_result_s": 600.0}) <= 600_000


async def test_results_may_be_kept_for_ever(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    assert await ttl_ms(foreign, make_worker, {}, keep_result_forever=True) == -1


async def test_a_functions_own_keep_result_goes_before_the_workers(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    assert 200_000 < await ttl_ms(foreign, make_worker, {"keep_result": 300}) <= 300_000
    assert await ttl_ms(foreign, make_worker, {"keep_result_forever": True}) == -1


async def test_a_function_that_keeps_no_result(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    assert await ttl_ms(foreign, make_worker, {"keep_result": 0}) == -2


async def test_a_result_that_was_damaged_is_an_error_at_the_caller(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    job = await foreign.enqueue_job("add", 1, 2)
    assert job is not None
    await burst(make_worker(func(add, name="add")))
    await foreign.set(ARQ_RESULT + job.job_id, b"\xc1 no msgpack")
    with pytest.raises(DeserializationError):
        await answer(job)
    await foreign.delete(ARQ_RESULT + job.job_id)


async def test_all_results_are_listed(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    for number in range(3):
        await foreign.enqueue_job("add", number, b=1, _job_id=f"{keys.run}:{number}")
    await foreign.enqueue_job("breaks", _job_id=f"{keys.run}:bad")
    await burst(make_worker(func(add, name="add"), func(breaks, name="breaks")))
    found = {one.job_id: one for one in await foreign.all_job_results() if one.queue_name == keys.jobs}
    assert sorted(job_id or "" for job_id in found) == sorted(f"{keys.run}:{name}" for name in (0, 1, 2, "bad"))
    for number in range(3):
        one = found[f"{keys.run}:{number}"]
        assert (one.function, list(one.args), one.kwargs) == ("add", [number], {"b": 1})
        assert (one.success, one.result, one.job_try) == (True, number + 1, 1)
        assert one.enqueue_time <= one.start_time <= one.finish_time
    assert (found[f"{keys.run}:bad"].success, found[f"{keys.run}:bad"].kwargs) == (False, {})


async def test_nothing_is_left_but_results(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    ids = [f"{keys.run}:{number}" for number in range(3)]
    for job_id in ids:
        await foreign.enqueue_job("add", 1, 2, _job_id=job_id)
    worker = make_worker(func(add, name="add"))
    await burst(worker)
    await worker.close()
    left = {name.decode() for name in await client.keys(f"*{keys.run}*")}
    assert left - {keys.wake, f"{keys.sweep}:turn"} == {*(ARQ_RESULT + job_id for job_id in ids), keys.counts}
    books = await counts(client, keys)
    assert (books.get("enqueued", 0), books["called"], books["bytes"]) == (0, 3, 0)
    now = await snapshot(client, keys)
    assert (now.enqueued, reached(now, "enqueued"), reached(now, "answered")) == (0, 3, 3), "a counter never falls"
