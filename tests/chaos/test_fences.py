"""Two processes in one role, against a real broker: the one that lost it takes and writes nothing more."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker.streams import Ownership, StreamReader, result_reader
from sluice.pipeline.errors import LeaseLost
from sluice.pipeline.wire.keys import Keys

pytestmark = pytest.mark.chaos


async def reader_of(client: Redis, keys: Keys, name: str) -> tuple[Ownership, StreamReader]:
    """A reader that plays the role now."""
    owner = Ownership(client, keys, "consumer:0")
    assert await owner.try_acquire()
    reader = result_reader(client, keys, 0, name, owner)
    await reader.open()
    return owner, reader


async def test_a_reader_that_lost_its_role_takes_nothing_from_its_successor(client: Redis, keys: Keys) -> None:
    owner, late = await reader_of(client, keys, "late")
    await client.delete(owner.key)  # it was paused, and its claim ran out
    _, successor = await reader_of(client, keys, "successor")
    await client.xadd(late.stream, {"r": "x"})
    with pytest.raises(LeaseLost, match="took over this role"):
        await late.read(8, block_ms=10)
    with pytest.raises(LeaseLost, match="took over this role"):
        await owner.confirm()
    assert [entry.fields for entry in await successor.read(8, block_ms=10)] == [{b"r": b"x"}]


async def test_a_reader_sees_each_entry_once_and_wakes_for_new_ones(client: Redis, keys: Keys) -> None:
    _, reader = await reader_of(client, keys, "one")
    assert await reader.read(8, block_ms=10) == []
    for value in ("a", "b"):
        await client.xadd(reader.stream, {"r": value})
        assert [entry.fields[b"r"] for entry in await reader.read(8, block_ms=1000)] == [value.encode()]
    assert await reader.read(8, block_ms=10) == []
    assert len(await result_reader(client, keys, 0, "next").open()) == 2


async def test_a_role_that_another_one_played_to_its_end_is_not_taken_up_again(client: Redis, keys: Keys) -> None:
    owner, late = await reader_of(client, keys, "late")
    await client.delete(owner.key)
    successor, _ = await reader_of(client, keys, "successor")
    await successor.release()
    await client.xadd(late.stream, {"r": "x"})
    with pytest.raises(LeaseLost, match="took over this role"):
        await late.read(8, block_ms=10)
    with pytest.raises(LeaseLost, match="took over this role"):
        await owner.confirm()


async def test_a_claim_that_ran_out_unnoticed_is_taken_up_again(client: Redis, keys: Keys) -> None:
    owner, reader = await reader_of(client, keys, "slow")
    await client.delete(owner.key)
    await client.xadd(reader.stream, {"r": "x"})
    assert len(await reader.read(8, block_ms=10)) == 1
    await owner.confirm()
