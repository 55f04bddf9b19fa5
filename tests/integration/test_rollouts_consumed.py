"""Agent rollouts from their opening to the trainer's ack: nothing of them is lost, counted twice or left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sluice.consumers.loop import Consumer
from sluice.pipeline.broker.streams import Ownership, ack_batches, batch_reader
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue.rollouts import RolloutHead, Rollouts
from sluice.pipeline.run.role import Role
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import TrainingBatch, decode
from tests.deadlines import HANG_S
from tests.integration.test_consumer_loop import CONTEXT, TASK
from tests.roles import eventually, role_of, run_config
from tests.rollout_state import counts, head, trajectory, turn


async def train_one_batch(role: Role) -> list[str]:
    """Wait for it and ack it, as the trainer does; the names of its samples."""

    async def handed() -> bool:
        return await role.client.xlen(role.keys.batches) == 1

    await eventually(handed, "the last batch")
    reader = batch_reader(role.client, role.keys, "t")
    [entry] = await reader.open() or await reader.read(1, 10)
    names = [sample.seq_id for sample in decode(TrainingBatch, entry.fields[b"b"]).samples]
    owner = Ownership(role.client, role.keys, "trainer")
    await owner.acquire(10, role.status.waiting)
    await ack_batches(role.scripts, role.keys, owner.key, owner.nonce, [(entry.entry_id, len(names))])
    return names


def looked_twice(role: Role, pending: int) -> Callable[[], Awaitable[bool]]:
    """Two heartbeats with so many samples: in between it has looked whether the run is at its end."""
    seen: set[float] = set()

    async def holds() -> bool:
        rows = (await snapshot(role.client, role.keys)).alive("consumer")
        seen.update(row.at for row in rows if row.facts.get("pending") == pending)
        return len(seen) > 1

    return holds


async def opened(rollouts: Rollouts) -> list[RolloutHead]:
    """A group of three with a turn each, and one alone; the source holds no more."""
    group = [head(f"g:{index}", group_id="g", group_size=3, index=index) for index in range(3)]
    await rollouts.open([*group, head("alone")])
    for each in group:
        await rollouts.add(each.rollout_id, turn())
    return group


async def test_every_rollout_is_accounted_for_to_the_last_byte(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    """Of the group one forks, one does not, one is dropped; the one alone is dropped last."""
    rollouts = Rollouts(client, keys, partitions=1, ttl_s=600)
    group = await opened(rollouts)
    await client.hset(keys.source, "exhausted", 1)
    producer, consumer = {"samples_per_version": 8, "max_in_flight": 64}, {"on_incomplete_group": "train_partial"}
    config = run_config(broker_config, keys, run_dir, producer=producer, consumer=consumer)
    async with role_of(config, "consumer", "c") as role:
        owner = Ownership(client, keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        running = asyncio.create_task(Consumer(role, 0, owner, TASK, CONTEXT).run())
        await rollouts.publish("g:1", [trajectory(group[1])], 1)
        await rollouts.publish("g:0", [trajectory(group[0], part, 2) for part in range(2)], 1)
        await rollouts.drop("g:2", "agent_error")
        await eventually(looked_twice(role, pending=3), "the group's samples")
        assert await client.xlen(keys.batches) == 0, "an open rollout may still bring results"
        await rollouts.drop("alone", "agent_error")
        assert await train_one_batch(role) == ["g:0", "g:0/1", "g:1"]
        await asyncio.wait_for(running, HANG_S)
    assert await counts(client, keys) == {
        "enqueued": 5, "committed": 3, "accepted": 3, "trained": 3, "dropped": 2, "dropped:agent_error": 2,
    }  # fmt: skip
    assert (await snapshot(client, keys)).complete
