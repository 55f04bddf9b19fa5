"""A broker that is full or takes no writes, with a real server: who writes waits under a named cause, nothing is lost.

- What frees memory (hand-off, ack, dropped dead letters) and what tells who lives goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis.exceptions import OutOfMemoryError

from sluice.consumers.tasks.task import Task
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.streams import Ownership, ack_batches, batch_reader
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.queue import JobQueue, LeaseKeeper
from sluice.pipeline.queue.dead_letters import Selection, drop
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.submit import produce
from sluice.workers.engine.hf import HfBackend
from tests.deadlines import RUN_S
from tests.decode_workers import working
from tests.hosts.disks import SmallDisk
from tests.integration.stalls.looking import TASK, HeldMatch, config_of, consuming, put_result, stalled, why
from tests.killable_broker import KillableBroker
from tests.roles import eventually, role_of
from tests.trainers import train_step


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = KillableBroker(tmp_path_factory.mktemp("small"))
    server.start()
    config = BrokerConfig(url=server.url, retry_for_s=RUN_S)
    asyncio.run(connection.wait_ready(config))
    yield config
    server.kill()


@pytest.fixture
async def small(settings: BrokerConfig) -> AsyncIterator[Any]:
    """A client of the broker, which has room again when the test ends."""
    client: Any = connection.connect(settings)
    yield client
    await client.config_set("maxmemory", 0)
    await client.aclose()


@contextlib.asynccontextmanager
async def training(config: Config, source: Path) -> AsyncIterator[None]:
    async with role_of(config, "trainer", "trainer") as role:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        role.spawn(owner.keep())
        running = asyncio.create_task(Trainer(role, owner, train_step(source), source).run())
        yield
        await running


async def test_every_process_waits_for_room_and_goes_on(
    settings: BrokerConfig, small: Any, keys: Keys, tmp_path: Path, source: Path, engine: HfBackend
) -> None:
    worker = {"poll_s": 0.01, "max_batch": 4}
    sampling = {"max_new_tokens": 4}
    config = config_of(settings, keys, tmp_path, 6, model={"path": str(source)}, worker=worker, sampling=sampling)

    async def some_trained() -> bool:
        return (await snapshot(small, keys)).trained >= 2

    async def all_wait() -> bool:
        rows = (await why(config)).now.processes
        if not {"trainer", "consumer-0", "worker-0"} <= {row.name for row in rows}:
            return False
        found = {(row.is_alive, row.wait and row.wait.kind, row.waiting_for) for row in rows}
        return found == {(True, WaitKind.BROKER_MEMORY, "memory in the broker, which is full")}

    async def all_ended() -> bool:
        return (await snapshot(small, keys)).complete

    async with training(config, source), consuming(config), working(config, engine, "worker-0"):
        producing = asyncio.create_task(produce(config))
        await eventually(some_trained, "the first step")
        await small.config_set("maxmemory", 1)
        look, stall = await stalled(config, "broker_full")
        assert "writers wait" in stall_text(look.now, stall).says
        assert "maxmemory" in stall_text(look.now, stall).remedy
        assert look.verdict.state == "stalled"
        await eventually(all_wait, "every process to say that it waits for room")
        assert not (await snapshot(small, keys)).complete
        await small.config_set("maxmemory", 0)
        await eventually(all_ended, "the run to go on to its end")
        await producing
    now = await snapshot(small, keys)
    assert (now.enqueued, now.trained, now.dead, now.dropped) == (6, 6, 0, 0)
    assert now.redelivered_jobs == 0
    assert [row.name for row in now.processes] == []


async def test_leases_are_renewed_in_a_full_broker(
    settings: BrokerConfig, small: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(settings, keys, tmp_path, 1, worker={"lease_s": 60.0, "renew_s": 0.05})
    await produce(config)
    queue = JobQueue(small, keys, worker="w")
    [claim] = (await queue.claim(1, 60, 3)).claims
    await small.config_set("maxmemory", 1)
    first = await small.zscore(keys.leases, claim.job_id)
    keeper = LeaseKeeper(config, queue, time.monotonic, lambda *lost: None)
    keeper.hold(claim)
    keeper.start()

    async def renewed() -> bool:
        return await small.zscore(keys.leases, claim.job_id) > first

    try:
        await eventually(renewed, "the lease to be renewed")
    finally:
        keeper.stop()


READ_ONLY = {
    "replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "it is a replica"),
    "alone": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "fewer replicas"),
}


@pytest.mark.parametrize("why_not", READ_ONLY)
async def test_a_broker_that_takes_no_writes_is_the_cause_and_nobody_is_dead(
    why_not: str, settings: BrokerConfig, small: Any, keys: Keys, tmp_path: Path
) -> None:
    """Its processes' heartbeats are as old as the refusal."""
    refuse, allow, words = READ_ONLY[why_not]
    config = config_of(settings, keys, tmp_path, 2)
    async with role_of(config, "worker", "worker-0") as role:
        await produce(config)
        await role.status.beat()
        await small.execute_command(*refuse.split())
        try:
            look, stall = await stalled(config, "broker_read_only")
        finally:
            await small.execute_command(*allow.split())
    assert [each.kind for each in look.now.stalls] == ["broker_read_only"]
    assert words in stall_text(look.now, stall).says
    assert look.verdict.state == "stalled"


@pytest.mark.skipif(os.geteuid() != 0, reason="fills a tmpfs, which only root can mount")
async def test_a_broker_whose_disk_is_full_is_the_cause_and_goes_on_once_there_is_room(
    keys: Keys, tmp_path: Path
) -> None:
    disk = SmallDisk(tmp_path / "disk", 1)
    server = KillableBroker(disk.directory)
    try:
        server.start()
        config = config_of(BrokerConfig(url=server.url, retry_for_s=RUN_S), keys, tmp_path, 2)
        async with role_of(config, "worker", "worker-0") as role:
            await produce(config)
            disk.fill()
            beats = asyncio.create_task(role.status.run())
            look, stall = await stalled(config, "broker_read_only")
            assert [each.kind for each in look.now.stalls] == ["broker_read_only"]
            assert "its disk is full" in stall_text(look.now, stall).says
            disk.free()

            async def taken() -> bool:
                kinds = {each.kind for each in (await why(config)).now.stalls}
                return "broker_read_only" not in kinds and "no_process" not in kinds

            await eventually(taken, "the broker to take writes again")
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
    finally:
        server.kill()
        disk.close()


async def test_a_full_broker_empties_itself(settings: BrokerConfig, small: Any, keys: Keys, tmp_path: Path) -> None:
    config = config_of(settings, keys, tmp_path, 1)
    held = HeldMatch()
    for number in range(2):
        await put_result(small, keys, f"r{number}", number + 1)

    async def taken() -> bool:
        return (await inspect(small, keys, 1)).lag[0].taken == 2

    async def handed_on() -> bool:
        return (await snapshot(small, keys)).waiting_batches == 1

    async with consuming(config, Task(TASK.name, TASK.parse, held, TASK.target)):
        await eventually(taken, "the results to be read")
        await small.config_set("maxmemory", 1)
        held.go_on.set()
        await eventually(handed_on, "the hand-off of two results")
    owner = Ownership(small, keys, "trainer")
    await small.config_set("maxmemory", 0)
    assert await owner.try_acquire()
    reader = batch_reader(small, keys, "trainer", owner)
    await reader.open()
    [entry] = await reader.read(8, 10)
    await small.config_set("maxmemory", 1)
    assert await owner.try_acquire()
    scripts = Scripts(small)
    assert await ack_batches(scripts, keys, owner.key, owner.nonce, [(entry.entry_id, 2)]) == 2
    assert (await snapshot(small, keys)).waiting_batches == 0


async def test_dead_letters_can_be_dropped_to_make_room(
    settings: BrokerConfig, small: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(settings, keys, tmp_path, 2)
    await produce(config)
    queue = JobQueue(small, keys, worker="w")
    for claim in (await queue.claim(2, 30, 3)).claims:
        await queue.fail(claim, "invalid_request", "no")
    await small.config_set("maxmemory", 1)
    done = await asyncio.to_thread(drop, config, Selection(everything=True))
    assert [each.problem for each in done] == [None, None]
    assert (await snapshot(small, keys)).dead_letters == 0


async def test_a_wait_for_room_ends_with_an_error_that_says_what_to_do(settings: BrokerConfig, small: Any) -> None:
    await small.config_set("maxmemory", 1)
    hasty: Any = connection.connect(replace(settings, retry_for_s=0.3))
    try:
        with pytest.raises(OutOfMemoryError, match=r"no space was freed in 0.3 s: give it more memory \(`redis-cli"):
            await hasty.set("a", 1)
    finally:
        await hasty.aclose()
