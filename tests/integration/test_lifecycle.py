"""A role process: it announces itself, waits with a name, and leaves in order. And the registry of versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError, LeaseLost, WeightsError, first_cause
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.waits import WaitKind
from tests.deadlines import HANG_S
from tests.roles import role_of, run_config


async def test_a_role_is_on_the_status_page_while_it_lives(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    async with role_of(run_config(broker_config, keys, run_dir), "worker", "w-7") as role:
        role.status.waiting(WaitKind.PEER, "the moon")
        role.status.fact(version=3)
        await role.status.beat()
        [row] = (await snapshot(client, keys)).alive("worker")
        assert (row.name, row.waiting_for, row.facts["version"]) == ("w-7", "the moon", 3)
        assert row.facts["metrics"].startswith("127.0.0.1:")
        assert row.wait is not None
        assert (row.wait.kind, row.wait.subject) == (WaitKind.PEER, "the moon")
        assert row.waiting_since == row.wait.since is not None
        role.status.waiting(None)
        assert (role.status.row.wait, role.status.row.waiting_for, role.status.row.waiting_since) == (None, None, None)
    assert (await snapshot(client, keys)).processes == []


async def test_a_wait_keeps_its_first_time_while_its_cause_is_the_same(client: Any, keys: Keys) -> None:
    status = StatusReporter(client, keys, "worker", "w")
    status.waiting(WaitKind.DRAIN, "requests", 5)
    since = status.row.waiting_since
    status.waiting(WaitKind.DRAIN, "requests", 4)
    assert status.row.waiting_since == since
    assert status.row.waiting_for == "4 requests to finish (draining)"
    status.waiting(WaitKind.JOBS)
    assert status.row.waiting_for == "jobs (none is ready)"
    assert (status.row.waiting_since or 0) > (since or 0)


async def test_a_nap_ends_at_once_when_asked_to_stop(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> None:
    async with role_of(run_config(broker_config, keys, run_dir)) as role:
        assert await role.nap(0)
        asyncio.get_running_loop().call_soon(role.stop.set)
        assert not await asyncio.wait_for(role.nap(600), HANG_S)


async def test_a_background_task_that_loses_a_cancellation_is_ended_all_the_same(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path
) -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:  # what asyncio.wait_for of Python 3.11 does now and then
                lost += 1
                if lost > 2:
                    raise

    async with asyncio.timeout(HANG_S):
        async with role_of(run_config(broker_config, keys, run_dir)) as role:
            role.spawn(deaf())
            await asyncio.sleep(0)
    assert lost == 3


async def test_a_background_task_that_fails_ends_the_role_with_its_error(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path
) -> None:
    async def fail() -> None:
        raise LeaseLost("taken")

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the scope raises, not one line of it
        async with role_of(run_config(broker_config, keys, run_dir)) as role:
            role.spawn(fail())
            await asyncio.sleep(60)
    assert isinstance(first_cause(caught.value), LeaseLost)


async def test_a_role_without_a_broker_says_so(keys: Keys, run_dir: Path) -> None:
    config = run_config(BrokerConfig(url="redis://127.0.0.1:1/0", retry_for_s=0.2), keys, run_dir)
    with pytest.raises(BrokerError, match="does not answer"):
        async with role_of(config):
            pass


def test_the_cause_that_a_user_reads_is_ours() -> None:
    ours = BrokerError("ours")
    group = BaseExceptionGroup("a", [ValueError("x"), BaseExceptionGroup("b", [KeyError("y"), ours])])
    assert first_cause(group) is ours
    assert isinstance(first_cause(BaseExceptionGroup("a", [ValueError("x")])), ValueError)
    assert first_cause(ours) is ours


async def test_a_metric_that_was_not_finite_breaks_no_status_page(client: Any, keys: Keys) -> None:
    await client.set(keys.metrics, '{"train/loss":null,"rollout/f1":0.5}')
    assert (await snapshot(client, keys)).metrics == {"rollout/f1": 0.5}


class Publisher:
    def __init__(self, client: Any, keys: Keys) -> None:
        self.registry, self.owner = WeightsRegistry(client, keys), Ownership(client, keys, "trainer")

    async def publish(self, version: int, digest: str = "d", retention: int = 3, keep: int | None = None) -> None:
        manifest = WeightVersion(version=version, path="p", digest=f"{digest}{version}")
        gone = [number for number in range(version - retention + 1) if number != keep]
        await self.registry.register(manifest, self.owner.key, self.owner.nonce, gone)

    async def put_back(self, version: int, digest: str = "d", path: str = "p") -> None:
        manifest = WeightVersion(version=version, path=path, digest=f"{digest}{version}")
        await self.registry.put_back(manifest, self.owner.key, self.owner.nonce)


async def test_versions_keep_one_digest_each_and_the_newest_may_be_an_older_one(client: Any, keys: Keys) -> None:
    trainer = Publisher(client, keys)
    assert await trainer.owner.try_acquire()
    assert await trainer.registry.latest() is None
    for version in (0, 1, 1, 2, 5):
        await trainer.publish(version)  # a repeat is the same version; a gap is harmless
    assert await trainer.registry.latest() == 5
    await trainer.publish(1)  # a kill undid what came later
    assert await trainer.registry.latest() == 1
    for version in (1, 5):
        with pytest.raises(WeightsError, match=rf"version {version} refused \(conflict\)"):
            await trainer.publish(version, "other")
    assert await trainer.registry.latest() == 1
    await trainer.publish(4)  # the broker had lost it with its last second
    assert await trainer.registry.latest() == 4
    await trainer.publish(6)
    assert await trainer.registry.latest() == 6


async def test_the_registry_forgets_retired_versions_but_never_their_digests(client: Any, keys: Keys) -> None:
    trainer = Publisher(client, keys)
    assert await trainer.owner.try_acquire()
    for version, kept in ((0, [0]), (1, [0, 1]), (2, [1, 2]), (3, [2, 3]), (6, [6]), (7, [6, 7]), (50, [50])):
        await trainer.publish(version, retention=2)
        assert [number for number in range(51) if await trainer.registry.get(number)] == kept
    with pytest.raises(WeightsError, match="conflict"):
        await trainer.publish(0, "other")


async def test_the_version_to_keep_outlives_every_retention_and_can_be_put_back(client: Any, keys: Keys) -> None:
    trainer = Publisher(client, keys)
    assert await trainer.owner.try_acquire()

    async def registered() -> list[int]:
        return [number for number in range(51) if await trainer.registry.get(number)]

    for version, kept in ((0, [0]), (1, [0, 1]), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 9]), (50, [1, 50])):
        await trainer.publish(version, retention=2, keep=1)
        assert await registered() == kept
    await client.delete(keys.versions)
    await trainer.put_back(1, path="elsewhere")
    restored = await trainer.registry.get(1)
    assert restored is not None
    assert restored.path == "elsewhere"
    assert await registered() == [1]
    assert await trainer.registry.latest() == 50, "workers don't go back to it"
    with pytest.raises(WeightsError, match=r"version 1 refused \(conflict\)"):
        await trainer.put_back(1, "other")


async def test_the_next_number_is_one_that_nobody_has_used(client: Any, keys: Keys, tmp_path: Path) -> None:
    trainer = Publisher(client, keys)
    assert await trainer.owner.try_acquire()
    assert await trainer.registry.next_number(0, tmp_path) == 1
    for version in range(3):
        await trainer.publish(version)
    assert await trainer.registry.next_number(1, tmp_path) == 3  # the checkpoint of version 2 is gone
    (tmp_path / "v000004").mkdir()
    (tmp_path / ".v000009.1.tmp").mkdir()
    assert await trainer.registry.next_number(2, tmp_path) == 5  # the broker lost versions 3 and 4
    assert await trainer.registry.next_number(7, tmp_path) == 8
    await trainer.publish(9)
    await trainer.publish(1)
    assert await trainer.registry.next_number(1, tmp_path) == 10  # a kill undid up to version 9


async def test_a_trainer_that_was_replaced_publishes_nothing(client: Any, keys: Keys) -> None:
    old, new = Publisher(client, keys), Publisher(client, keys)
    assert await old.owner.try_acquire()
    await Scripts(client).ask(RoleKey(owner=old.owner.key), Disown(nonce=old.owner.nonce))
    assert await new.owner.try_acquire()
    with pytest.raises(LeaseLost):
        await old.publish(0)
    assert await new.registry.latest() is None


async def test_a_damaged_registry_entry_is_a_weights_error(client: Any, keys: Keys) -> None:
    await client.hset(keys.versions, "3", b"junk")
    with pytest.raises(WeightsError, match="unreadable"):
        await WeightsRegistry(client, keys).get(3)
