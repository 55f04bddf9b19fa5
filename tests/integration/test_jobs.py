"""The queue against a real broker: credit, leases, fences, dead letters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.errors import LeaseLost
from sluice.pipeline.queue import Call, Credit, Finished, JobQueue, arq_payload, arq_serializer
from sluice.pipeline.queue.envelope import arq_pool
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import SequenceResult, decode
from tests.factories import decode_job, sequence_result

PLENTY = Credit(max_in_flight=10_000, samples_per_version=10_000, max_staleness=1)
LEASE_S = 0.3


def queue_of(client: Redis, keys: Keys, worker: str = "w") -> JobQueue:
    return JobQueue(client, keys, worker=worker)


async def claim(queue: JobQueue, capacity: int = 8, lease_s: float = 30, attempts: int = 3) -> list[Any]:
    return (await queue.claim(capacity, lease_s, attempts)).claims


async def enqueue(queue: JobQueue, *names: str, n: int = 1, **changes: Any) -> list[str]:
    jobs = [decode_job(f"{queue.keys.run}:{name}", n=n, **changes) for name in names]
    return list(await queue.enqueue(jobs, PLENTY))


async def test_enqueue_is_idempotent_and_typed(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    assert await enqueue(queue, "a", "b", "a") == ["enqueued", "enqueued", "duplicate"]
    [first, _] = await claim(queue)
    result = sequence_result(first.job_id)
    assert await queue.commit([Finished(first, result)]) == ["ok"]
    assert await enqueue(queue, "a") == ["done"]
    assert (await snapshot(client, keys)).enqueued == 2


async def test_credit_limits_in_flight_and_staleness(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    jobs = [decode_job(f"{keys.run}:{i}", n=2) for i in range(6)]
    narrow = Credit(max_in_flight=6, samples_per_version=100, max_staleness=0)
    cursors = [f"0:{i}" for i in range(6)]
    outcomes = await queue.enqueue(jobs, narrow, cursors)
    assert outcomes == ["enqueued"] * 3 + ["over_credit"] * 3
    raw: Any = client
    assert await raw.hget(keys.source, "cursor") == b"0:2"
    stale = Credit(max_in_flight=100, samples_per_version=4, max_staleness=1)
    assert await queue.enqueue(jobs[3:], stale) == ["enqueued", "over_credit", "over_credit"]
    await client.set(keys.latest, 1)  # a version makes room for as many as were trained for it: none so far
    assert await queue.enqueue(jobs[4:], stale) == ["over_credit", "over_credit"]
    await raw.hincrby(keys.counts, "trained", 4)
    assert await queue.enqueue(jobs[4:], stale) == ["enqueued", "enqueued"]


async def test_a_producer_that_comes_back_late_enqueues_nothing_and_moves_no_position(
    client: Redis, keys: Keys
) -> None:
    late, successor = Ownership(client, keys, "producer"), Ownership(client, keys, "producer")
    jobs, cursors = [decode_job(f"{keys.run}:{i}") for i in range(4)], [f"0:{i}" for i in range(4)]
    first, second = (JobQueue(client, keys, producer=owner) for owner in (late, successor))
    assert await late.try_acquire()
    assert await first.enqueue(jobs[:1], PLENTY, cursors[:1]) == ["enqueued"]
    await client.delete(late.key)  # paused for longer than its claim lasts
    assert await first.enqueue(jobs[1:2], PLENTY, cursors[1:2], behind="0:0") == ["enqueued"], "nobody took over"
    assert await successor.try_acquire()
    assert await second.enqueue(jobs[:3], PLENTY, cursors[:3]) == ["duplicate", "duplicate", "enqueued"]
    for index in (1, 3):
        with pytest.raises(LeaseLost, match="producer"):
            await first.enqueue(jobs[index:], PLENTY, cursors[index:], behind="0:1")
    raw: Any = client
    assert await raw.hget(keys.source, "cursor") == b"0:2"
    assert (await snapshot(client, keys)).enqueued == 3
    assert await enqueue(queue_of(client, keys), "another program's") == ["enqueued"]


async def test_an_over_credit_job_stops_the_ones_behind_it(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "first")
    jobs = [decode_job(f"{keys.run}:big", n=5), decode_job(f"{keys.run}:small", n=1)]
    assert await queue.enqueue(jobs, Credit(4, 100, 0)) == ["over_credit", "over_credit"]


async def test_a_job_alone_in_the_system_is_admitted_whatever_its_size(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    [big, next_one] = [decode_job(f"{keys.run}:{name}", n=5) for name in ("big", "next")]
    assert await queue.enqueue([big], Credit(4, 4, 0, max_bytes=1)) == ["over_credit"], "it would be stale"
    assert await queue.enqueue([big, next_one], Credit(4, 100, 0, max_bytes=1)) == ["enqueued", "over_credit"]
    [held] = await claim(queue)
    await queue.fail(held, "invalid_request", "no")
    assert await queue.enqueue([next_one], Credit(4, 100, 0)) == ["enqueued"]


async def test_priority_then_age(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "old")
    await asyncio.sleep(0.005)
    await enqueue(queue, "new")
    await enqueue(queue, "urgent", priority=1)
    order = [item.job_id.rpartition(":")[2] for item in await claim(queue)]
    assert order == ["urgent", "old", "new"]


async def test_a_deferred_call_has_its_priority_when_it_comes_due(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    calls = [
        Call(job_id=f"{keys.run}:{name}", function="f", priority=priority, defer_s=600)
        for name, priority in (("plain", 0), ("urgent", 1000))
    ]
    await queue.enqueue_calls([*calls, Call(job_id=f"{keys.run}:ready", function="f", priority=1)])
    await client.zadd(keys.jobs, {call.job_id: time.time() * 1000 - 1000 for call in calls}, xx=True)
    assert [item.job_id.rpartition(":")[2] for item in await claim(queue)] == ["urgent", "ready", "plain"]


async def test_a_foreign_job_has_its_priority_once_it_is_read(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    arq, hello = arq_pool(client, keys.jobs), [{"role": "user", "content": "hi"}]
    for name, priority in (("plain", 0), ("urgent", 1000)):
        await arq.enqueue_job("decode", messages=hello, priority=priority, _job_id=f"{keys.run}:{name}", _defer_by=-1)
    assert await queue.release(await claim(queue)) == 2
    assert [item.job_id.rpartition(":")[2] for item in await claim(queue)] == ["urgent", "plain"]


async def test_each_job_is_claimed_once_by_many_workers(client: Redis, keys: Keys) -> None:
    await enqueue(queue_of(client, keys), *[str(i) for i in range(50)])
    queues = [queue_of(client, keys, f"w{i}") for i in range(5)]
    taken = await asyncio.gather(*(claim(queue, 20) for queue in queues))
    ids = [item.job_id for group in taken for item in group]
    assert len(ids) == len(set(ids)) == 50


async def test_an_expired_lease_is_redelivered_and_the_late_attempt_is_fenced(client: Redis, keys: Keys) -> None:
    first, second = queue_of(client, keys, "dead"), queue_of(client, keys, "alive")
    await enqueue(first, "a", n=2)
    [old] = await claim(first)
    assert await first.commit([Finished(old, sequence_result(old.job_id, 0, 2))]) == ["ok"]
    assert await claim(second) == []
    assert await first.renew(LEASE_S, {old.job_id: old.attempt}) == []
    await asyncio.sleep(LEASE_S + 0.05)
    [new] = await claim(second)
    assert (new.attempt, new.committed) == (2, frozenset({0}))
    late = Finished(old, sequence_result(old.job_id, 1, 2))
    assert await first.commit([late]) == ["fenced"]
    assert await second.commit([Finished(new, sequence_result(new.job_id, 1, 2))]) == ["ok"]
    assert await first.commit([late]) == ["dup"]
    seen = [decode(SequenceResult, fields[b"r"]).seq_id for _, fields in await client.xrange(keys.results + "0")]
    assert seen == [f"{old.job_id}:0", f"{old.job_id}:1"]
    assert await client.exists(ARQ_JOB + old.job_id) == 0


async def test_a_job_that_comes_back_to_the_worker_that_has_it_blames_nobody(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "a")
    for attempt in (1, 2, 3, 4):
        [item] = await claim(queue, lease_s=0.01, attempts=2)
        assert item.attempt == attempt
        await asyncio.sleep(0.03)


async def test_what_lies_behind_a_refused_job_stays_refused(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "known")
    jobs = [decode_job(f"{keys.run}:{name}") for name in ("new", "known", "newer")]
    outcomes = await queue.enqueue(jobs, Credit(1, 100, 0), ["0:1", "0:2", "0:3"])
    assert outcomes == ["over_credit"] * 3
    raw: Any = client
    assert await raw.hget(keys.source, "cursor") is None


async def test_release_blames_nobody_and_keeps_the_place(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "a")
    for _ in range(5):
        [item] = await claim(queue, attempts=1)
        assert await queue.release([item]) == 1
        assert await queue.release([item]) == 0
    assert await queue.commit([Finished(item, sequence_result(item.job_id))]) == ["fenced"]
    assert (await snapshot(client, keys)).dead == 0


async def test_a_foreign_arq_job_is_decoded_and_a_malformed_one_becomes_a_dead_letter(
    client: Redis, keys: Keys
) -> None:
    queue = queue_of(client, keys)
    good = decode_job(f"{keys.run}:foreign")
    payloads = {
        good.job_id: arq_payload(good),
        f"{keys.run}:junk": b"\x80\x04junk",
        f"{keys.run}:fn": arq_serializer({"t": None, "f": "other", "a": (), "k": {}, "et": 0}),
        f"{keys.run}:args": arq_serializer({"t": None, "f": "decode", "a": [b"no"], "k": {}, "et": 0}),
    }
    for job_id, payload in payloads.items():
        await client.set(ARQ_JOB + job_id, payload)
        await client.zadd(keys.jobs, {job_id: 1})
    claims = {item.job_id.rpartition(":")[2]: item for item in await claim(queue)}
    assert claims["foreign"].job == good
    assert claims["fn"].function == "other"  # the worker knows its functions, the queue does not
    for name, words in (("junk", "envelope"), ("args", "payload")):
        assert claims[name].job is None
        assert words in claims[name].problem
        assert await queue.fail(claims[name], "malformed", claims[name].problem) == 1
    assert await queue.fail(claims["junk"], "again", "") == -1


async def test_a_missing_payload_and_a_late_start_are_dead_letters(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "gone")
    await enqueue(queue, "late", deadline_s=0.01)
    await client.delete(ARQ_JOB + f"{keys.run}:gone")
    await asyncio.sleep(0.03)
    assert await claim(queue) == []
    assert (await snapshot(client, keys)).reasons == {"dead:payload_missing": 1, "dead:expired": 1}


@pytest.mark.parametrize("kind", ["owner", "attempt"])
async def test_commit_needs_owner_and_attempt(client: Redis, keys: Keys, kind: str) -> None:
    queue, other = queue_of(client, keys), queue_of(client, keys)
    await enqueue(queue, "a")
    [item] = await claim(queue)
    finished = Finished(item, sequence_result(item.job_id))
    if kind == "attempt":
        raw: Any = client
        await raw.hset(f"{keys.job_state}{item.job_id}", "attempt", 7)
        assert await queue.commit([finished]) == ["fenced"]
    else:
        assert await other.commit([finished]) == ["fenced"]


async def step_back(client: Any, keys: Keys, seconds: float) -> None:
    """The broker's clock goes back: every time that lies in the run is later than it was, seen from the new one."""
    for line in (keys.jobs, keys.leases, keys.alone):
        for job_id, score in await client.zrange(line, 0, -1, withscores=True):
            if score > 1e12:
                await client.zincrby(line, 1000 * seconds, job_id)


async def test_a_clock_that_steps_back_holds_up_nobody_and_changes_no_order(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "a", "b")
    await arq_pool(client, keys.jobs).enqueue_job("ping", _job_id=f"{keys.run}:foreign")
    while (
        await client.zscore(keys.jobs, f"{keys.run}:foreign") or 0
    ) > 1e12:  # arq rounds its time up to a millisecond
        await claim(queue, 0)
    await enqueue(queue, "c")
    [first] = await claim(queue, 1)
    await queue.release([first])
    await step_back(client, keys, 45)
    await enqueue(queue, "later")
    await enqueue(queue, "urgent", priority=1)
    names = [one.job_id.rpartition(":")[2] for one in await claim(queue)]
    assert names == ["urgent", "a", "b", "foreign", "c", "later"]


async def test_what_was_delayed_goes_back_to_its_place(client: Redis, keys: Keys) -> None:
    queue = queue_of(client, keys)
    await enqueue(queue, "a", "b")
    await queue.release(await claim(queue, 1), delay_s=600)
    assert [one.job_id for one in await claim(queue, 1)] == [f"{keys.run}:b"]
    await client.zadd(keys.jobs, {f"{keys.run}:a": time.time() * 1000 - 1})  # its time has come
    await enqueue(queue, "c")
    assert [one.job_id for one in await claim(queue)] == [f"{keys.run}:a", f"{keys.run}:c"]
