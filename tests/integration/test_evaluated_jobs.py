"""Jobs of an evaluation against a real broker: counted apart, outside the credit, each sequence once."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.jobs import Claim
from sluice.pipeline.queue import Credit, Outcome
from sluice.pipeline.queue.envelope import arq_payload
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import EVALUATION, DeadLetter, DecodeJob, SequenceResult, decode
from tests.asking import Asked
from tests.counters import reached
from tests.factories import decode_job

_FEW = Credit(max_in_flight=2, samples_per_version=2, max_staleness=0, max_bytes=4000)


@pytest.fixture
def asked(client: Any, keys: Keys) -> Asked:
    return Asked(client, keys)


def held_out(keys: Keys, name: str = "e", **changes: Any) -> DecodeJob:
    return decode_job(f"{{{keys.run}}}:{name}", reply_to=EVALUATION, **changes)


async def enqueue(asked: Asked, *jobs: DecodeJob, credit: Credit = _FEW) -> list[Outcome]:
    return await asked.queue.enqueue(jobs, credit)


async def ended(asked: Asked) -> dict[str, SequenceResult | DeadLetter]:
    found: dict[str, SequenceResult | DeadLetter] = {}
    for _, fields in await asked.client.xrange(asked.keys.evaluated):
        one = decode(SequenceResult, fields[b"r"]) if b"r" in fields else decode(DeadLetter, fields[b"d"])
        assert one.seq_id not in found
        found[one.seq_id] = one
    return found


async def test_an_evaluation_takes_no_credit_and_ends_apart(asked: Asked, keys: Keys) -> None:
    job, train = held_out(keys, n=2, priority=9), decode_job(f"{{{keys.run}}}:t", n=2)
    assert await enqueue(asked, job, credit=Credit(0, 0, 0)) == ["enqueued"]
    now = await snapshot(asked.client, keys)
    assert (now.enqueued, now.credit.sequences, now.credit.bytes, now.queued_jobs, now.evaluating_jobs) == (
        0, 0, 0, 1, 1,
    )  # fmt: skip
    assert await enqueue(asked, train) == ["enqueued"], "all the credit there is is left"
    claim = await asked.claim()
    assert claim.job_id == job.job_id, "it has the higher priority"
    before = (await snapshot(asked.client, keys)).credit
    assert await asked.store(claim, 0, 1, 2) == "ok"
    assert (await snapshot(asked.client, keys)).credit == before, "progress of an evaluation holds none either"
    assert [await asked.commit(claim, index, 2) for index in (0, 1, 1)] == ["ok", "ok", "dup"]
    assert set(await ended(asked)) == {f"{job.job_id}:0", f"{job.job_id}:1"}
    now = await snapshot(asked.client, keys)
    assert (now.evaluated, now.evaluating_jobs, now.enqueued, now.committed, now.credit) == (2, 0, 2, 0, before)
    assert await enqueue(asked, job) == ["done"]
    other = await asked.claim()
    for index in (0, 1):
        await asked.commit(other, index, 2)
    counted = await asked.counted()
    assert (counted["committed"], counted["evaluated"], counted.get("replied", 0)) == (2, 2, 0)


async def test_one_that_cannot_be_decoded_is_evaluated_with_its_reason(asked: Asked, keys: Keys) -> None:
    assert await enqueue(asked, held_out(keys, n=2)) == ["enqueued"]
    claim = await asked.claim()
    assert await asked.commit(claim, 1, 2) == "ok"
    assert await asked.queue.fail(claim, "invalid_request", "too long") == 1
    first = (await ended(asked))[f"{claim.job_id}:0"]
    assert isinstance(first, DeadLetter)
    assert first.reason == "invalid_request"
    now = await snapshot(asked.client, keys)
    assert (now.evaluated, now.evaluating_jobs, now.dead, now.dropped, now.enqueued) == (2, 0, 0, 0, 0)
    assert now.reasons == {"evaluated:invalid_request": 1}
    assert await asked.client.xlen(keys.dead) == await asked.client.xlen(keys.dropped) == 0
    assert await asked.client.exists(keys.results + "0") == 0
    assert (await asked.counted()).get("bytes", 0) == 0


async def test_a_worker_that_dies_over_it_loses_nothing_of_it(asked: Asked, keys: Keys) -> None:
    await enqueue(asked, held_out(keys, n=2))
    claim = await asked.claim()
    await asked.commit(claim, 0, 2)
    assert await asked.queue.reap(asked.queue.owner, killed=True) == 1
    again = await asked.claim()
    assert (again.attempt, again.committed) == (2, {0})
    assert await asked.commit(claim, 1, 2) == "fenced"
    assert await asked.commit(again, 1, 2) == "ok"
    assert set(await ended(asked)) == {f"{claim.job_id}:0", f"{claim.job_id}:1"}
    assert ((await snapshot(asked.client, keys)).evaluating_jobs, (await asked.counted())["evaluated"]) == (0, 2)


async def test_one_that_was_cancelled_leaves_no_count_behind(asked: Asked, keys: Keys) -> None:
    job = held_out(keys, n=3)
    assert await enqueue(asked, job, credit=Credit(0, 0, 0)) == ["enqueued"]
    await asked.queue.cancel([job.job_id])
    assert (await asked.queue.claim(1, 30, 3)).claims == []
    now = await snapshot(asked.client, keys)
    assert (now.evaluated, now.evaluating_jobs, now.queued_jobs, now.ended) == (3, 0, 0, 0)


async def test_a_foreign_job_for_the_evaluator_leaves_the_counts_right(asked: Asked, keys: Keys) -> None:
    job = held_out(keys, n=2)
    await asked.client.set(ARQ_JOB + job.job_id, arq_payload(job, 1))
    await asked.client.zadd(keys.jobs, {job.job_id: 1})
    seen = list[float]()

    async def look() -> None:
        seen.append(reached(await snapshot(asked.client, keys), "enqueued"))

    claimed = Claim(
        owner="dies", worker="w", lease_ms=30_000, capacity=1, max_deaths=3, held_jobs=0, call_number=1, version=b"",
        watch_ms=0, prefix_wait_ms=0,
    )  # fmt: skip
    assert len((await Scripts(asked.client).ask(asked.queue.names, claimed)).jobs) == 1  # it dies before it has read it
    await look()
    await asked.queue.reap("dies", killed=True)
    claim = await asked.claim()
    await look()
    for index in (0, 1):
        assert await asked.commit(claim, index, 2) == "ok"
        await look()
    assert seen == [1, 1, 1, 1], "a counter that falls looks like one that began anew"
    await asked.assert_balanced(evaluated=2, evaluating=0, enqueued=0, bytes=0)
