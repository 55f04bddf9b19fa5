"""A close look at a run, against a real broker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import Claim, Credit, Finished, JobQueue
from sluice.pipeline.status.descriptions import waits
from sluice.pipeline.status.heartbeat import FORGET_S, Heartbeat, StatusReporter, forget_dead
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import RESULT_GROUP, Keys
from sluice.pipeline.wire.waits import WaitKind
from tests.factories import decode_job, sequence_result
from tests.roles import eventually, role_of, run_config

PLENTY = Credit(max_in_flight=10_000, samples_per_version=10_000, max_staleness=1)


async def enqueue(queue: JobQueue, *names: str, n: int = 1) -> None:
    await queue.enqueue([decode_job(f"{queue.keys.run}:{name}", n=n) for name in names], PLENTY)


async def claim(queue: JobQueue, capacity: int, lease_s: float = 300) -> list[Claim]:
    return (await queue.claim(capacity, lease_s, 3)).claims


async def store_row(client: Redis, keys: Keys, name: str, age_s: float) -> None:
    at = time.time() - age_s
    row = Heartbeat(role="worker", name=name, pid=1, host="h", started=at, at=at)
    await client.hset(keys.processes, name, msgspec.json.encode(row).decode())  # type: ignore[misc]


async def test_ready_running_deferred_and_alone_are_told_apart(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w-1")
    await enqueue(queue, "late", "a", "b", "c", "d")
    await queue.release(await claim(queue, 1), delay_s=600)
    held = await claim(queue, 2)
    for _ in range(2):  # two workers die over it: from then on it runs alone
        suspect = JobQueue(client, keys, worker="dead")
        assert len(await claim(suspect, 1)) == 1
        assert await suspect.reap(suspect.owner) == 1
    now = await inspect(client, keys, 1)
    assert now.depth is not None
    depth = now.depth
    assert (depth.ready, depth.running, depth.deferred, depth.alone, depth.seen_all) == (1, 2, 1, 1, True)
    assert {lease.job_id for lease in now.leases} == {item.job_id for item in held}
    assert {(lease.worker, lease.attempt, lease.alone) for lease in now.leases} == {("w-1", 1, False)}
    assert all(200 < lease.left_s <= 300 and lease.age_s >= 0 for lease in now.leases)
    assert (now.attempts, now.queued_jobs) == ({"1": 2}, 5)


async def test_attempts_and_deaths_of_leased_jobs(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w-2")
    await enqueue(queue, "a", n=3)
    suspect = JobQueue(client, keys, worker="w-1")
    await claim(suspect, 3)
    assert await suspect.reap(suspect.owner) == 1
    [again] = await claim(queue, 3)
    await queue.commit([Finished(again, sequence_result(again.job_id, 0, 3))])
    now = await inspect(client, keys, 1)
    [lease] = now.leases
    assert (lease.worker, lease.attempt, lease.deaths, lease.sequences, lease.committed) == ("w-2", 2, 1, 3, 1)
    assert (now.attempts, now.deaths, now.redelivered_jobs) == ({"2": 1}, 1, 1)


async def test_the_oldest_leases_come_first_and_only_some_are_shown(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    for number in range(30):
        await enqueue(queue, f"j{number}")
    assert len(await claim(queue, 30)) == 30
    now = await inspect(client, keys, 1)
    assert now.depth is not None
    assert (now.depth.running, now.attempts, len(now.leases)) == (30, {"1": 30}, 20)
    held = [lease.held_s or 0.0 for lease in now.leases]
    assert held == sorted(held, reverse=True)


async def test_a_long_queue_is_counted_and_not_read(client: Redis, keys: Keys) -> None:
    """Commands that the look takes do not grow with the queue."""
    raw: Any = client
    far = (time.time() + 3600) * 1000
    await raw.zadd(keys.jobs, {f"{keys.run}:later-{number}": far + number for number in range(3000)})
    await raw.zadd(keys.jobs, {f"{keys.run}:ready-{number}": number for number in range(3000)})
    queue = JobQueue(client, keys, worker="w")
    await enqueue(queue, "first")
    await raw.zadd(keys.jobs, {f"{keys.run}:first": -1})
    assert len(await claim(queue, 1, lease_s=7200)) == 1  # it ends after all that is deferred
    before = (await raw.info("commandstats")).get("cmdstat_hmget", {}).get("calls", 0)
    now = await inspect(client, keys, 1)
    assert (await raw.info("commandstats"))["cmdstat_hmget"]["calls"] - before <= 1001
    assert now.depth is not None
    depth = now.depth
    assert (depth.ready, depth.running, depth.deferred, depth.seen_all) == (3000, 1, 3000, False)


async def test_the_lag_of_each_stream(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, partitions=2, worker="w")
    await enqueue(queue, *[f"j{number}" for number in range(12)])
    items = await claim(queue, 12)
    await queue.commit([Finished(item, sequence_result(item.job_id)) for item in items])
    read = f"{keys.results}0"
    await client.xgroup_create(read, RESULT_GROUP, id="0")
    taken = await client.xreadgroup(RESULT_GROUP, "c", {read: ">"}, count=1)
    assert taken
    now = await inspect(client, keys, 2)
    assert [lag.stream for lag in now.lag] == ["results:0", "results:1", "batches"]
    assert sum(lag.entries for lag in now.lag) == 12
    assert [lag.taken for lag in now.lag] == [1, 0, 0]
    assert all(lag.oldest_s is not None and 0 <= lag.oldest_s < 60 for lag in now.lag[:2])
    assert now.lag[2].oldest_s is None


async def test_credit_is_what_is_held_and_the_limits_of_the_producer(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    raw: Any = client
    await enqueue(queue, "a", "b", n=2)
    now = await inspect(client, keys, 1)
    assert (now.credit.sequences, now.credit.max_sequences, now.credit.max_bytes) == (4, None, None)
    assert now.credit.bytes == int(await raw.hget(keys.counts, "bytes")) > 0
    await raw.hset(keys.source, mapping={"max_in_flight": 4, "max_bytes": 1 << 30})
    now = await inspect(client, keys, 1)
    assert (now.credit.max_sequences, now.credit.max_bytes, now.credit.is_used_up) == (4, 1 << 30, True)
    [first, _] = await claim(queue, 4)
    await queue.fail(first, "invalid_request", "no")
    now = await inspect(client, keys, 1)
    assert (now.credit.sequences, now.dead, now.dead_letters, now.ended) == (2, 2, 2, 2)


async def test_a_waiting_process_is_named_with_its_cause(
    client: Redis, broker_config: BrokerConfig, keys: Keys, run_dir: Path
) -> None:
    await enqueue(JobQueue(client, keys), "a")
    async with role_of(run_config(broker_config, keys, run_dir), "trainer", "t-1") as role:
        role.status.waiting(WaitKind.BATCHES)
        await role.status.beat()
        now = await inspect(client, keys, 1)
    [row] = now.processes
    assert row.is_alive
    assert row.waiting_s is not None
    said = waits(now)
    assert any(line.startswith("t-1 waits for training batches from the consumers, ") for line in said)
    assert "no worker is alive, and 1 job waits" in said
    assert "no producer is alive, and there are rows to read" in said
    assert not any(line.startswith(("no trainer", "no consumer")) for line in said)


@pytest.mark.parametrize("apart_s", [3600.0, -3600.0])
async def test_a_hosts_clock_decides_neither_who_is_alive_nor_who_is_forgotten(
    apart_s: float, client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are dated by the broker's clock, which judges them."""
    await store_row(client, keys, "silent", 12)
    real = time.time
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: real() + apart_s)
        status = StatusReporter(client, keys, "worker", "w")
        status.waiting(WaitKind.JOBS)
        await status.beat()
        await forget_dead(client, keys)
    now = await snapshot(client, keys)
    rows = {row.name: row for row in now.processes}
    assert set(rows) == {"silent", "w"}
    assert [row.name for row in now.alive("worker")] == ["w"]
    for value in (rows["w"].at, rows["w"].started, rows["w"].wait and rows["w"].wait.since):
        assert value == pytest.approx(real(), abs=60)
    await status.beat()  # the host's clock has been put right
    await status.beat()
    [again] = [row for row in (await snapshot(client, keys)).processes if row.name == "w"]
    assert (again.started, again.at) == (rows["w"].started, pytest.approx(real(), abs=60))
    assert status.broker_time() == pytest.approx(real(), abs=60)


async def test_dead_rows_are_shown_for_an_hour_and_a_look_removes_none(client: Redis, keys: Keys) -> None:
    await store_row(client, keys, "silent", 12)
    await store_row(client, keys, "forgotten", FORGET_S + 5)
    assert [row.name for row in (await snapshot(client, keys)).processes] == ["silent"]
    now = await inspect(client, keys, 1)
    [row] = now.processes
    assert not row.is_alive
    assert 12 <= row.age_s < 60
    raw: Any = client
    assert sorted(await raw.hkeys(keys.processes)) == [b"forgotten", b"silent"]
    assert (await forget_dead(client, keys), await forget_dead(client, keys)) == (1, 0)
    assert await raw.hkeys(keys.processes) == [b"silent"]


async def test_a_process_that_starts_removes_rows_of_the_long_dead(client: Redis, keys: Keys) -> None:
    await store_row(client, keys, "forgotten", FORGET_S + 5)
    raw: Any = client
    running = asyncio.create_task(StatusReporter(client, keys, "worker", "new").run())

    async def forgotten() -> bool:
        return await raw.hkeys(keys.processes) == [b"new"]

    await eventually(forgotten, "the old row to go")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_json_goes_there_and_back(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    await enqueue(queue, "a", "b")
    await claim(queue, 1)
    now = await inspect(client, keys, 1)
    read = msgspec.json.decode(msgspec.json.encode(now), type=Snapshot)
    assert read == now
    assert read.schema_version == 3
