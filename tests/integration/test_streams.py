"""Results to batches to the trainer's ack: owned, fenced, repeatable."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker import streams
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Read, StreamKeys
from sluice.pipeline.broker.streams import Ownership, StreamReader, ack_batches, batch_reader, hand_off, result_reader
from sluice.pipeline.errors import DeadlineExceeded, LeaseLost
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, decode, encode
from sluice.pipeline.wire.waits import WaitKind
from tests.deadlines import HANG_S
from tests.factories import decode_job, sequence_result, training_sample


async def fill(client: Redis, keys: Keys, count: int) -> None:
    for index in range(count):
        await client.xadd(keys.results + "0", {"r": encode(sequence_result(f"g{index}"))})


def no_waiting(kind: WaitKind | None, subject: str = "", count: int | None = None) -> None:
    """Nobody is told."""


async def owner_of(client: Redis, keys: Keys, role: str = "consumer:0") -> Ownership:
    owner = Ownership(client, keys, role)
    await owner.acquire(1, no_waiting)
    return owner


def batch(name: str, *seq_ids: str) -> TrainingBatch:
    return TrainingBatch(batch_id=name, samples=[training_sample(seq_id) for seq_id in seq_ids])


async def put(
    client: Redis, keys: Keys, reader: StreamReader, owner: Ownership, out: TrainingBatch, ids: list[str]
) -> str:
    return await hand_off(
        Scripts(client),
        keys,
        reader=reader,
        owner_key=owner.key,
        nonce=owner.nonce,
        batch=out,
        result_ids=ids,
        result_bytes=0,
        drops=[],
    )


async def test_a_dead_readers_entries_are_taken_over_in_order(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 5)
    first = result_reader(client, keys, 0, "first")
    assert await first.open() == []
    taken = await first.read(3, block_ms=10)
    second = result_reader(client, keys, 0, "second")
    assert [entry.entry_id for entry in await second.open()] == [entry.entry_id for entry in taken]
    assert len(await second.read(10, block_ms=10)) == 2


async def test_takeover_skips_entries_that_were_deleted(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 3)
    first = result_reader(client, keys, 0, "first")
    await first.open()
    taken = await first.read(3, block_ms=10)
    await client.xdel(first.stream, taken[1].entry_id)
    found = await result_reader(client, keys, 0, "second").open()
    assert [entry.entry_id for entry in found] == [taken[0].entry_id, taken[2].entry_id]


async def test_an_entry_that_was_deleted_before_its_reader_saw_it_is_skipped(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 4)
    reader = result_reader(client, keys, 0, "c")
    await reader.open()
    lost = Read(nonce="", group=reader.group, reader=reader.name, count=3, last_seen="0-0")  # its answer never arrives
    await Scripts(client).ask(StreamKeys(stream=reader.stream, owner=None), lost)
    ids = [entry_id.decode() for entry_id, _ in await client.xrange(reader.stream)]
    await client.xdel(reader.stream, ids[1])
    found = [entry.entry_id for entry in await reader.read(9, block_ms=10)]
    found += [entry.entry_id for entry in await reader.read(9, block_ms=10)]
    assert found == [ids[0], ids[2], ids[3]]
    assert (await cast(Any, client).xpending(reader.stream, reader.group))["pending"] == 3


async def test_a_reader_goes_on_when_the_newest_entry_of_the_one_before_was_deleted(client: Redis, keys: Keys) -> None:
    """Redis 6.2 leaves it to the group at the takeover, and gives it out without fields."""
    await fill(client, keys, 3)
    first, second = (result_reader(client, keys, 0, name) for name in ("first", "second"))
    await first.open()
    taken = await first.read(2, block_ms=10)
    await client.xdel(first.stream, taken[1].entry_id)
    assert [entry.entry_id for entry in await second.open()] == [taken[0].entry_id]
    assert len(await second.read(9, block_ms=10)) == 1
    assert (await cast(Any, client).xpending(first.stream, first.group))["pending"] == 2


async def test_hand_off_moves_whole_and_once(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 2)
    reader, owner = result_reader(client, keys, 0, "c"), await owner_of(client, keys)
    await reader.open()
    ids = [entry.entry_id for entry in await reader.read(2, block_ms=10)]
    out = batch("b1", "g0:0", "g1:0")
    assert await put(client, keys, reader, owner, out, ids) == "ok"
    assert await put(client, keys, reader, owner, out, ids) == "dup"  # a retry after a lost answer
    assert await reader.depth() == 0
    now = await snapshot(client, keys)
    assert (now.accepted, now.waiting_batches) == (2, 1)


async def test_a_consumer_that_lost_its_partition_changes_nothing(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 1)
    reader, owner = result_reader(client, keys, 0, "c"), await owner_of(client, keys)
    await reader.open()
    ids = [entry.entry_id for entry in await reader.read(1, block_ms=10)]
    await client.set(owner.key, "somebody else")
    with pytest.raises(LeaseLost):
        await put(client, keys, reader, owner, batch("b", "g0:0"), ids)
    assert (await snapshot(client, keys)).waiting_batches == 0
    assert await reader.depth() == 1


async def test_drops_are_recorded_with_their_letters(client: Redis, keys: Keys) -> None:
    await fill(client, keys, 1)
    reader, owner = result_reader(client, keys, 0, "c"), await owner_of(client, keys)
    await reader.open()
    ids = [entry.entry_id for entry in await reader.read(1, block_ms=10)]
    letter = DeadLetter(seq_id="g0:0", reason="invalid_truth", state="dropped")
    empty = TrainingBatch(batch_id="d", samples=[])
    await hand_off(
        Scripts(client),
        keys,
        reader=reader,
        owner_key=owner.key,
        nonce=owner.nonce,
        batch=empty,
        result_ids=ids,
        result_bytes=0,
        drops=[letter],
    )
    now = await snapshot(client, keys)
    assert (now.dropped, now.reasons, now.waiting_batches) == (1, {"dropped:invalid_truth": 1}, 0)
    [(_, fields)] = await client.xrange(keys.dropped)
    assert decode(DeadLetter, fields[b"d"]) == letter


async def test_acks_count_once_and_only_for_the_owner(client: Redis, keys: Keys) -> None:
    entry_id = (await client.xadd(keys.batches, {"b": encode(batch("b", "a:0", "b:0"))})).decode()
    reader, owner = batch_reader(client, keys, "t"), await owner_of(client, keys, "trainer")
    await reader.open()
    await reader.read(1, block_ms=10)
    scripts = Scripts(client)
    pairs = [(entry_id, 2)]
    assert await ack_batches(scripts, keys, owner.key, owner.nonce, pairs) == 2
    assert await ack_batches(scripts, keys, owner.key, owner.nonce, pairs) == 0
    assert (await snapshot(client, keys)).trained == 2
    with pytest.raises(LeaseLost):
        await ack_batches(scripts, keys, owner.key, "another nonce", pairs)


async def test_what_the_trainer_drops_counts_as_dropped_and_once(client: Redis, keys: Keys) -> None:
    ids = [
        (await client.xadd(keys.batches, {"b": encode(batch(name, f"{name}:0", f"{name}:1"))})).decode()
        for name in "ab"
    ]
    owner, raw, scripts = await owner_of(client, keys, "trainer"), cast(Any, client), Scripts(client)
    await raw.hset(keys.counts, "accepted", 4)
    reader = batch_reader(client, keys, "t", owner)
    await reader.open()
    await reader.read(2, block_ms=10)
    letters = [DeadLetter(seq_id=f"b:{index}", reason=why, state="dropped") for index, why in ((0, "stale"), (1, "x"))]
    drops = {ids[0]: [DeadLetter(seq_id="a:1", reason="stale", state="dropped")], ids[1]: letters}

    async def ack(entry_id: str) -> int:
        return await ack_batches(scripts, keys, owner.key, owner.nonce, [(entry_id, 2)], drops)

    for expected in (1, 0):
        assert await ack(ids[0]) == expected
        assert await ack(ids[1]) == 0
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.accepted) == (1, 3, 1)
    assert now.reasons == {"dropped:stale": 2, "dropped:x": 1}
    found = [decode(DeadLetter, fields[b"d"]) for _, fields in await raw.xrange(keys.dropped)]
    assert found == [*drops[ids[0]], *letters]


async def test_drops_of_the_trainer_let_decoding_run_no_further_ahead(client: Redis, keys: Keys) -> None:
    """After version 1 of one sample out of two, and a step of two that gave none: as many wait as before."""
    queue, credit = JobQueue(client, keys, worker="w"), Credit(100, samples_per_version=2, max_staleness=1)
    jobs = [decode_job(f"{keys.run}:{index}") for index in range(9)]
    assert (await queue.enqueue(jobs, credit)).count("enqueued") == 4
    for name, dropped in (("a", 1), ("b", 2)):
        entry_id = (await client.xadd(keys.batches, {"b": encode(batch(name, f"{name}:0", f"{name}:1"))})).decode()
        owner = await owner_of(client, keys, f"trainer {name}")
        reader = batch_reader(client, keys, name, owner)
        await reader.open()
        await reader.read(1, block_ms=10)
        drops = {entry_id: [DeadLetter(seq_id=f"{name}:{index}", reason="stale") for index in range(dropped)]}
        await ack_batches(Scripts(client), keys, owner.key, owner.nonce, [(entry_id, 2)], drops)
    await client.set(keys.latest, 1)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.trained, now.dropped) == (4, 1, 3)
    assert (await queue.enqueue(jobs[4:], credit)).count("enqueued") == 4


async def test_one_owner_at_a_time_and_the_wait_names_its_cause(
    client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TTL_S", HANG_S)  # whatever holds us up, the first one's claim doesn't expire
    first = await owner_of(client, keys, "trainer")
    causes: list[tuple[WaitKind | None, str]] = []

    def waiting(kind: WaitKind | None, subject: str = "", count: int | None = None) -> None:
        causes.append((kind, subject))

    second = Ownership(client, keys, "trainer")
    with pytest.raises(DeadlineExceeded, match="trainer"):
        await second.acquire(0.3, waiting)
    assert causes[0] == (WaitKind.ROLE, "trainer")
    await first.release()
    await second.acquire(1, waiting)
    assert causes[-1] == (None, "")


async def test_an_owner_that_was_replaced_learns_of_it(client: Redis, keys: Keys) -> None:
    owner = await owner_of(client, keys)
    keeping = asyncio.create_task(owner.keep())
    await client.set(owner.key, "somebody else")
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, HANG_S)


async def test_a_renewal_that_comes_after_the_release_takes_no_role(client: Redis, keys: Keys) -> None:
    first = await owner_of(client, keys, "trainer")
    await first.release()
    assert not await first.try_acquire(), "a renewal that was on its way"
    await first.confirm()  # nobody took it: it was given back
    await asyncio.wait_for(first.keep(), HANG_S)
    second = Ownership(client, keys, "trainer")
    assert await second.try_acquire()
    assert not await first.try_acquire()
