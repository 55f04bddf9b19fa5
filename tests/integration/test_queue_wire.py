"""Around the jobs: progress, abort, byte credit, lost parts of the broker, foreign callers, the wake-up signal."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from arq.jobs import Job, JobStatus
from redis.asyncio import Redis

from sluice.pipeline.queue import (
    Call,
    Claim,
    Credit,
    Finished,
    JobQueue,
    Piece,
    SourceRewound,
    arq_deserializer,
    arq_pool,
    arq_serializer,
)
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_JOB, ARQ_RESULT, Keys, tagged
from sluice.pipeline.wire.messages import Progress, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.deadlines import HANG_S
from tests.factories import decode_job, sequence_result
from tests.roles import eventually

PLENTY = Credit(10_000, 10_000, 1)


async def held(queue: JobQueue, capacity: int = 8) -> list[Claim]:
    return (await queue.claim(capacity, 30, 3)).claims


async def held_bytes(client: Any, keys: Keys) -> int:
    return int(await client.hget(keys.counts, "bytes") or 0)


def progress(offset: int, *tokens: int, version: int = 1) -> Progress:
    return Progress(
        offset=offset,
        token_ids=TokenArray(tokens),
        logprobs=FloatArray([-0.5] * len(tokens)),
        versions=Runs.of([version] * len(tokens)),
    )


async def test_progress_goes_to_the_next_attempt_inside_the_credit(client: Redis, keys: Keys) -> None:
    first, second = JobQueue(client, keys, worker="1"), JobQueue(client, keys, worker="2")
    await first.enqueue([decode_job(f"{keys.run}:a", n=2)], PLENTY)
    [claim] = await held(first)
    before = await held_bytes(client, keys)
    pieces = [Piece(claim, 1, progress(0, 5, 6)), Piece(claim, 1, progress(2, 7, version=2))]
    assert await first.checkpoint(pieces) == ["ok", "ok"]
    assert await first.checkpoint([pieces[1], Piece(claim, 1, progress(9, 1))]) == ["dup", "gap"]
    assert await held_bytes(client, keys) > before
    assert await first.reap(first.owner) == 1
    [again] = await held(second)
    assert list(again.progress) == [1]
    stored = again.progress[1]
    assert (list(stored.token_ids), list(stored.versions), len(stored.logprobs)) == ([5, 6, 7], [1, 1, 2], 3)
    assert await first.checkpoint([Piece(claim, 1, progress(3, 8))]) == ["fenced"]
    assert await second.checkpoint([Piece(again, 1, progress(0, 9))]) == ["ok"]  # it started anew
    for index in (0, 1):
        done = Finished(again, sequence_result(again.job_id, index, 2))
        assert await second.commit([done]) == ["ok"]
    assert [key async for key in client.scan_iter(f"{keys.progress}*")] == []


async def test_everything_of_a_job_is_gone_at_its_end_but_arqs_result(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    await queue.enqueue([decode_job(f"{keys.run}:a")], PLENTY)
    [claim] = await held(queue)
    assert await queue.commit([Finished(claim, sequence_result(claim.job_id))]) == ["ok"]
    left = {key.decode() async for key in client.scan_iter(f"*{keys.run}:a*")}
    assert left == {f"arq:result:{keys.run}:a"}
    [(_, fields)] = await client.xrange(keys.results + "0")
    assert await held_bytes(client, keys) == len(fields[b"r"])


async def test_bytes_limit_what_is_under_way_but_never_one_job_alone(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    big: dict[str, Any] = {"metadata": {"pad": "x" * 4000}}
    jobs = [decode_job(f"{keys.run}:{name}", **big) for name in "abc"]
    tight = Credit(100, 100, 1, 6000)
    assert await queue.enqueue(jobs, tight) == ["enqueued", "over_credit", "over_credit"]
    [claim] = await held(queue)
    assert await queue.fail(claim, "invalid_request", "no") == 1
    assert await held_bytes(client, keys) > 4000  # the dead letter holds the payload
    assert await queue.enqueue(jobs[1:], tight) == ["enqueued", "over_credit"]


async def test_a_producer_learns_that_the_broker_lost_its_newest_part(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    jobs = [decode_job(f"{keys.run}:{name}") for name in "abc"]
    await queue.enqueue(jobs[:2], PLENTY, ["0:0", "0:1"])
    raw: Any = client
    await raw.hset(keys.source, "cursor", "0:0")
    with pytest.raises(SourceRewound) as back:
        await queue.enqueue(jobs[2:], PLENTY, ["0:2"], behind="0:1")
    assert back.value.cursor == "0:0"
    assert await queue.enqueue(jobs[1:], PLENTY, ["0:1", "0:2"], behind="0:0") == ["duplicate", "enqueued"]


async def test_arqs_own_job_handle_follows_a_decode_job(client: Redis, keys: Keys) -> None:
    queue, pool = JobQueue(client, keys), arq_pool(client, keys.jobs)
    job_id = f"{keys.run}:a"
    job = await pool.enqueue_job("decode", encode(decode_job(job_id, n=2)), _job_id=job_id)
    assert job
    assert await job.status() == JobStatus.queued
    [claim] = await held(queue)
    assert await client.ttl(ARQ_JOB + job_id) == -1  # a payload that is taken does not run out
    assert await job.status() == JobStatus.in_progress
    for index in (0, 1):
        await queue.commit([Finished(claim, sequence_result(job_id, index, 2))])
    assert await job.status() == JobStatus.complete
    assert await job.result(timeout=HANG_S) == {"committed": 2}
    assert await pool.enqueue_job("decode", b"", _job_id=job_id) is None
    assert (await snapshot(client, keys)).enqueued == 2


@pytest.mark.parametrize("shape", ["map", "fields"])
async def test_foreign_callers_may_give_plain_values(client: Redis, keys: Keys, shape: str) -> None:
    pool = arq_pool(client, keys.jobs)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "truth": {"x": [1]}}
    if shape == "map":
        job = await pool.enqueue_job("decode", fields)
    else:
        job = await pool.enqueue_job("decode", **fields)
    assert job
    queue, found = JobQueue(client, keys), list[Claim]()

    async def taken() -> bool:  # arq rounds its times up
        found.extend(await held(queue))
        return bool(found)

    await eventually(taken, "a claim")
    [claim] = found
    assert claim.job
    assert (claim.job.job_id, claim.job.n, claim.job.truth) == (job.job_id, 3, {"x": [1]})
    assert (await snapshot(client, keys)).enqueued == 3


@pytest.mark.parametrize("running", [False, True])
async def test_arqs_abort_ends_a_job_as_cancelled(client: Redis, keys: Keys, running: bool) -> None:
    queue = JobQueue(client, keys)
    job_id = f"{keys.run}:a"
    await queue.enqueue([decode_job(job_id, n=2), decode_job(f"{keys.run}:b")], PLENTY)
    if running:
        await held(queue, 1)
    job = Job(job_id, client, keys.jobs, arq_deserializer)
    abort = asyncio.create_task(job.abort(timeout=HANG_S, poll_delay=0.01))
    while not abort.done():
        got = await queue.claim(0, 30, 3, held=1)
        assert got.cancelled in ([], [job_id] if running else [])
        await asyncio.sleep(0.01)
    assert await abort
    now = await snapshot(client, keys)
    assert (now.dropped, now.reasons["dropped:cancelled"], now.dead) == (2, 2, 0)
    assert [claim.job_id for claim in await held(queue)] == [f"{keys.run}:b"]


async def test_a_late_abort_is_left_to_the_run_of_its_job(client: Redis, keys: Keys) -> None:
    """arq's set of aborts is one for all runs of a server; the id that an abort put back is in one line alone."""
    queue, job_id = JobQueue(client, keys), tagged(keys.run, "a")
    await queue.enqueue_calls([Call(job_id=job_id, function="f")])
    await client.zadd(ARQ_ABORT, {job_id: time.time() * 1000})
    await held(queue)
    assert await client.exists(f"{ARQ_RESULT}{job_id}")
    await client.zadd(keys.jobs, {job_id: 1})
    await client.zadd(ARQ_ABORT, {job_id: time.time() * 1000})
    await held(JobQueue(client, Keys(f"{keys.run}-other")))
    await queue.claim(0, 30, 3)
    assert await client.zscore(keys.jobs, job_id) is None
    assert await client.zscore(ARQ_ABORT, job_id) is None


async def test_an_abort_is_never_too_old_for_a_job_that_waits(client: Redis, keys: Keys) -> None:
    """Of this queue or of another one; what is nowhere any more is forgotten."""
    waiting, ended, unknown, others = (tagged(keys.run, name) for name in ("waiting", "ended", "unknown", "others"))
    queue, other = JobQueue(client, keys), JobQueue(client, Keys(f"{keys.run}-other"))
    await queue.enqueue_calls([Call(job_id=ended, function="f")])
    await queue.cancel([ended])
    await held(queue)
    await queue.enqueue_calls([Call(job_id=waiting, function="f")])
    await other.enqueue_calls([Call(job_id=others, function="f")])
    aborts = [waiting, ended, unknown, others]
    await client.zadd(ARQ_ABORT, {job_id: (time.time() - 7200) * 1000 for job_id in aborts})
    assert await held(queue) == []
    assert (await snapshot(client, keys)).dropped == 2
    assert [await client.zscore(ARQ_ABORT, job_id) is None for job_id in aborts] == [True, True, True, False]
    assert await held(other) == []
    assert await client.zscore(ARQ_ABORT, others) is None


async def test_a_call_in_arqs_abort_cannot_be_taken_by_another_worker(client: Redis, keys: Keys) -> None:
    """arq moves the score of a running job to 1 before it notes the abort."""
    queue, other = JobQueue(client, keys), JobQueue(client, keys)
    await queue.enqueue_calls([Call(job_id=f"{keys.run}:a", function="f")])
    [claim] = await held(queue)
    await client.zadd(keys.jobs, {claim.job_id: 1})
    assert await held(other) == []
    assert (await client.zscore(keys.jobs, claim.job_id) or 0) > 1e9


async def test_one_signal_lies_ready_whatever_comes(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    await queue.enqueue_calls([Call(job_id=f"{keys.run}:{i}", function="f") for i in range(5)])
    raw: Any = client
    assert await raw.llen(keys.wake) == 1
    await raw.lpop(keys.wake)
    await held(queue, 2)
    assert await raw.llen(keys.wake) == 1  # there is more: the next one is woken


async def test_hostile_envelopes_are_claimed_with_their_problem(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    envelope: dict[str, Any] = {"t": None, "f": "decode", "a": [], "k": {}, "et": 0}
    hostile: dict[str, bytes] = {
        "deep": b"\x91" * 100_000,
        "pickle": b"\x80\x04\x95",
        "empty": b"\x00",
        "args": arq_serializer({**envelope, "a": 7}),
        "function": arq_serializer({**envelope, "f": [1]}),
        "huge": arq_serializer({**envelope, "a": [{"n": 10**12, "messages": [{"role": "user", "content": "x"}]}]}),
        "none": arq_serializer(envelope),
        "endless": arq_serializer(
            {**envelope, "a": [{"messages": [{"role": "user", "content": "x"}], "deadline_s": 1e306}]}
        ),
        "inf": arq_serializer(
            {**envelope, "a": [{"messages": [{"role": "user", "content": "x"}], "deadline_s": float("inf")}]}
        ),
    }
    for name, payload in hostile.items():
        await client.set(f"{ARQ_JOB}{keys.run}:{name}", payload)
        await client.zadd(keys.jobs, {f"{keys.run}:{name}": 1})
    claims: list[Claim] = []
    while got := await held(queue, 100_000):
        claims += got
    for claim in claims:
        if claim.job is None:
            assert claim.problem, claim
            await queue.fail(claim, claim.reason, claim.problem)
    now = await snapshot(client, keys)
    assert now.dead == now.enqueued == len(hostile)
    assert {claim.job_id.rpartition(":")[2] for claim in claims} == set(hostile)
