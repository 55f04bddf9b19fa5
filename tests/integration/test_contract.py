"""What all processes of a run agree on, and whether the broker still has the run's data."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerDataGone, ConfigError, LeaseLost
from sluice.pipeline.queue.trained import INCARNATION, begin_again, recognise
from sluice.pipeline.run import role as contract
from sluice.pipeline.status.heartbeat import ALIVE_S, StatusReporter
from sluice.pipeline.wire.keys import Keys
from tests.clock import Ahead
from tests.deadlines import HANG_S
from tests.roles import role_of, run_config


@pytest.fixture
def made(broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> Any:
    return lambda **sections: run_config(broker_config, keys, run_dir, **sections)


STILL_S = 60.0


async def take_part(
    client: Any, config: Config, name: str, role: str = "worker", wait_s: float = 0.3, still_s: float = STILL_S
) -> None:
    status = StatusReporter(client, Keys(config.run), role, name)
    await contract.take_part(client, config, status, wait_s=wait_s, still_s=still_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    return Ahead(monkeypatch, contract)


async def test_a_process_that_says_otherwise_is_told_which_key_and_both_values(client: Any, made: Any) -> None:
    async with role_of(made(), "trainer", "t"):
        with pytest.raises(ConfigError) as caught:
            await take_part(client, made(consumer={"count": 2}, sampling={"temperature": 0.5}), "w")
    assert "consumer.count is 1 there and 2 here" in str(caught.value)
    assert "sampling.temperature is 1.0 there and 0.5 here" in str(caught.value)
    assert "(t)" in str(caught.value)


async def test_a_process_with_another_reward_is_told(client: Any, made: Any) -> None:
    async with role_of(made(rollout_matching={"reward": "a.py:score"}), "trainer", "t"):
        with pytest.raises(ConfigError, match=r'rollout_matching\.reward is "a\.py:score" there and null here'):
            await take_part(client, made(), "w")


async def test_who_is_alone_may_change_it(client: Any, keys: Keys, made: Any) -> None:
    await take_part(client, made(), "killed")  # its row is all that is left of it
    row = msgspec.json.decode(await client.hget(keys.processes, "killed") or b"")
    await client.hset(keys.processes, "killed", msgspec.json.encode(row | {"at": row["at"] - ALIVE_S + 0.2}))
    await take_part(client, made(producer={"samples_per_version": 8}), "new", wait_s=HANG_S, still_s=0.5)
    held = msgspec.json.decode(await client.get(keys.contract) or b"")
    assert held["producer.samples_per_version"] == 8


async def left_behind(client: Any, keys: Keys, name: str, **fields: Any) -> dict[str, Any]:
    """The row of a process that has not beaten for too long."""
    row = msgspec.json.decode(await client.hget(keys.processes, name) or b"")
    old = row | {"at": row["at"] - ALIVE_S - 1} | fields
    await client.hset(keys.processes, name, msgspec.json.encode(old))
    return old


async def test_who_was_without_the_broker_for_long_comes_back_and_is_heard(
    client: Any, keys: Keys, made: Any, clock: Ahead
) -> None:
    """A wrongly configured process asks before the others beat again."""
    await take_part(client, made(), "back")
    old = await left_behind(client, keys, "back")
    asks = asyncio.create_task(take_part(client, made(consumer={"count": 2}), "wrong"))
    await asyncio.sleep(0.1)
    assert not asks.done()
    await client.hset(keys.processes, "back", msgspec.json.encode(old | {"at": old["at"] + ALIVE_S + 1}))
    clock.by_s = 2 * STILL_S
    with pytest.raises(ConfigError, match=r"consumer.count is 1 there and 2 here.*\(back\)"):
        await asks
    assert msgspec.json.decode(await client.get(keys.contract))["consumer.count"] == 1


async def test_a_clock_that_is_late_makes_nobody_dead(client: Any, keys: Keys, made: Any, clock: Ahead) -> None:
    """Its rows look old, and change all the time."""
    await take_part(client, made(), "late")
    old = await left_behind(client, keys, "late")
    asks = asyncio.create_task(take_part(client, made(consumer={"count": 2}), "wrong"))
    while not asks.done():
        old["at"] += 0.01
        await client.hset(keys.processes, "late", msgspec.json.encode(old))
        clock.by_s += 1.0
        await asyncio.sleep(0.02)
    with pytest.raises(ConfigError, match=r"consumer.count is 1 there and 2 here.*\(late\)"):
        await asks


async def test_who_died_before_the_clock_was_set_back_is_not_waited_for(client: Any, keys: Keys, made: Any) -> None:
    await take_part(client, made(), "dead")
    await left_behind(client, keys, "dead", at=time.time() + 3600)
    await take_part(client, made(consumer={"count": 2}), "new", still_s=0.2)


async def test_who_said_that_it_ended_is_not_waited_for(client: Any, keys: Keys, made: Any) -> None:
    await take_part(client, made(), "ended")
    await left_behind(client, keys, "ended", ended_at=1.7e9, error="x")
    async with asyncio.timeout(HANG_S):
        status = StatusReporter(client, keys, "worker", "new")
        await contract.take_part(client, made(consumer={"count": 2}), status, wait_s=0, still_s=3600)


async def test_an_onlooker_takes_no_part(client: Any, made: Any) -> None:
    async with role_of(made(), "dashboard", "d"):
        await take_part(client, made(producer={"samples_per_version": 8}), "w")
        await take_part(client, made(producer={"samples_per_version": 8}), "x")


async def test_partitions_change_when_no_result_is_unread(client: Any, keys: Keys, made: Any) -> None:
    await take_part(client, made(consumer={"count": 2}), "c")
    await client.hdel(keys.processes, "c")
    entry = await client.xadd(f"{keys.results}1", {"r": b"x"})
    with pytest.raises(ConfigError, match="from 2 to 1, and 1 results wait in partition 1; let"):
        await take_part(client, made(), "c")
    await client.xdel(f"{keys.results}1", entry)
    await client.zadd(keys.rollouts, {"r": 1})  # its results go where it was opened
    with pytest.raises(ConfigError, match="from 2 to 1, and 1 rollouts are open; let"):
        await take_part(client, made(), "c")
    await client.delete(keys.rollouts)
    await take_part(client, made(), "c")


@pytest.mark.parametrize("damaged", [b"", b"no json", b"[1]", b'{"consumer.count": "x"}', b'{"consumer.count": 1e18}'])
async def test_a_damaged_contract_or_row_stops_nobody(client: Any, keys: Keys, made: Any, damaged: bytes) -> None:
    await client.set(keys.contract, damaged)
    for name, row in {"a": b"\xff", "b": b"[]", "c": b'{"at": "x"}', "d": b'{"at": null, "role": 7}'}.items():
        await client.hset(keys.processes, name, row)
    await take_part(client, made(), "w")


async def test_a_run_of_an_earlier_release_is_refused(client: Any, keys: Keys, made: Any) -> None:
    await client.set(f"sluice:{keys.run}:latest", "3")
    with pytest.raises(ConfigError, match=r"started by an earlier release.*--set run=NAME"):
        await take_part(client, made(), "w")


async def test_a_directory_knows_the_data_that_it_belongs_to(client: Any, keys: Keys, run_dir: Path) -> None:
    assert await recognise(client, keys, run_dir)
    assert await recognise(client, keys, run_dir)
    before = (run_dir / INCARNATION).read_text()
    await client.delete(keys.incarnation)
    for _ in range(2):  # a process that is killed before it began again changes nothing
        assert not await recognise(client, keys, run_dir)
    assert (run_dir / INCARNATION).read_text() == before
    await begin_again(client, keys, run_dir, 3, "step 3")
    assert (run_dir / INCARNATION).read_text() != before
    assert await recognise(client, keys, run_dir)
    for damaged in (b"\xff", b"", b"x" * 10):
        (run_dir / INCARNATION).write_bytes(damaged)
        assert await recognise(client, keys, run_dir)
        assert (run_dir / INCARNATION).read_text() == (await client.get(keys.incarnation)).decode()


async def test_a_contract_that_cannot_be_read_is_another_one(client: Any, keys: Keys, made: Any) -> None:
    async with role_of(made(), "trainer", "t"):
        for damaged in (b"[" * 5000, b'{"a": "\\ud800"}', b"\xff", b'{"consumer.count": 1e18}'):
            await client.set(keys.contract, damaged)
            with pytest.raises(ConfigError, match=r"run .* is running with another configuration"):
                await take_part(client, made(), "w")


async def test_a_role_that_the_broker_forgot_is_not_called_taken(client: Any, keys: Keys) -> None:
    owner, other = Ownership(client, keys, "trainer"), Ownership(client, keys, "trainer")
    assert await owner.try_acquire()
    await client.delete(owner.key, f"{owner.key}:last")
    with pytest.raises(BrokerDataGone, match="the broker's data are gone"):
        await owner.confirm()
    assert await other.try_acquire()
    with pytest.raises(LeaseLost, match="another process took over this role"):
        await owner.confirm()
