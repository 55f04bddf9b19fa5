"""A stock arq worker on the queue of a run: what it takes is accounted for."""

from __future__ import annotations

from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import Job
from arq.worker import Worker
from redis.asyncio import Redis

from sluice.pipeline.queue import Credit, Finished, JobFailed, JobQueue, arq_deserializer, arq_serializer
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.factories import decode_job, sequence_result

PLENTY = Credit(max_in_flight=1000, samples_per_version=1000, max_staleness=1)


async def decode_nothing(ctx: dict[str, Any], *args: Any) -> None:
    """Of a program that has nothing to do with Sluice."""


async def stock_worker(foreign: ArqRedis, keys: Keys, **options: Any) -> None:
    """arq's own worker, until the queue is empty."""
    worker = Worker(
        [decode_nothing], queue_name=keys.jobs, redis_pool=foreign, burst=True, handle_signals=False, **options
    )
    await worker.main()


async def swept(queue: JobQueue) -> int:
    """A whole look at the server's keys."""
    ended = 0
    while True:
        found, whole = await queue.sweep(0.001)
        ended += found
        if whole:
            return ended


@pytest.mark.parametrize("reads_msgpack", [True, False])
async def test_jobs_that_a_stock_worker_takes_end_as_dead(
    client: Redis, foreign: ArqRedis, keys: Keys, reads_msgpack: bool
) -> None:
    queue = JobQueue(client, keys, worker="w")
    [kept_id, *taken] = [f"{keys.run}:{name}" for name in ("kept", "a", "b")]
    await queue.enqueue([decode_job(kept_id)], PLENTY)
    [kept] = (await queue.claim(1, 30, 3)).claims
    await queue.enqueue([decode_job(job_id, n=2) for job_id in taken], PLENTY)
    serialisers = {"job_serializer": arq_serializer, "job_deserializer": arq_deserializer} if reads_msgpack else {}
    await stock_worker(foreign, keys, max_burst_jobs=2, **serialisers)
    assert (await queue.claim(8, 30, 3)).claims == []
    assert await swept(queue) == 4
    assert await swept(queue) == 0
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dead)]
    assert {letter.reason for letter in letters} == {"taken_by_foreign_worker"}
    assert await queue.commit([Finished(kept, sequence_result(kept_id))]) == ["ok"]
    now = await snapshot(client, keys)
    assert (now.enqueued, now.committed, now.dead) == (5, 1, 4)
    assert not await client.exists(*(keys.job_state + job_id for job_id in taken))


async def test_one_look_at_a_time(client: Redis, keys: Keys) -> None:
    queue, other = JobQueue(client, keys), JobQueue(client, keys)
    await queue.enqueue([decode_job(f"{keys.run}:a")], PLENTY)
    await client.zrem(keys.jobs, f"{keys.run}:a")
    assert await queue.sweep(60, 100_000) == (1, True)
    await queue.enqueue([decode_job(f"{keys.run}:b")], PLENTY)
    await client.zrem(keys.jobs, f"{keys.run}:b")
    assert await other.sweep(60, 100_000) == (0, False)


async def test_the_caller_of_a_job_that_was_taken_is_told(client: Redis, foreign: ArqRedis, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    await queue.enqueue([decode_job(f"{keys.run}:a")], PLENTY)
    await client.zrem(keys.jobs, f"{keys.run}:a")
    await swept(queue)
    with pytest.raises(JobFailed, match="taken_by_foreign_worker"):
        await Job(f"{keys.run}:a", foreign, keys.jobs, foreign.job_deserializer).result()


async def test_what_a_look_left_behind_goes_by_itself(client: Redis, keys: Keys) -> None:
    await client.mset({f"{keys.prefix}filler:{number}": 1 for number in range(200)})
    assert await JobQueue(client, keys).sweep(60, keys_at_once=1) == (0, False)
    assert 0 < await client.pttl(keys.sweep) <= 3_600_000
    assert await client.pttl(f"{keys.sweep}:turn") > 0
