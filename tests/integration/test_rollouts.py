"""Agent rollouts on a real broker: every word that a call can answer, and what the counters say afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.errors import LeaseLost, MessageError
from sluice.pipeline.queue import Credit, SourceRewound
from sluice.pipeline.queue.rollouts import Rollout, RolloutHead, Rollouts, SeenRollouts
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, decode, encode
from sluice.pipeline.wire.tokens import TokenArray
from tests.roles import eventually
from tests.rollout_state import counts, entries, head, held, trajectory, turn

STRANGE = "a:turns \u00e9\u4e1c\x00\n{}*" + "x" * 240  # any text is an id


@pytest.fixture
def rollouts(client: Any, keys: Keys) -> Rollouts:
    return Rollouts(client, keys, partitions=1, ttl_s=600)


async def test_a_rollout_grows_and_is_read_whole(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    request = {"messages": [{"role": "user", "content": "2+2?"}]}
    made = head(STRANGE, group_id="g", group_size=3, index=2, truth={"answer": "4"}, request=request)
    assert await rollouts.open([made]) == ["enqueued"]
    assert await rollouts.add(STRANGE, turn("a")) == ("ok", 0)
    assert await rollouts.add(STRANGE, turn("b", 0)) == ("ok", 1)
    assert await rollouts.add(STRANGE, turn("a")) == ("dup", 0)  # a retry after a lost answer
    assert await rollouts.add(STRANGE, turn("c", 0)) == ("ok", 2)  # a branch
    found = await rollouts.load(STRANGE)
    assert found is not None
    assert found.state == "open"
    assert [(one.key, one.parent) for one in found.turns] == [("a", -1), ("b", 0), ("c", 0)]
    assert found.turns[0] == turn("a")
    assert (found.head.truth, found.head.request, found.head.index) == ({"answer": "4"}, request, 2)
    assert found.head.opened_at > 1.7e9
    assert await rollouts.still_open() == [found.head]
    size = sum(map(len, map(encode, [found.head, *found.turns])))
    assert await counts(client, keys) == {"enqueued": 1, "bytes": size}
    assert (await snapshot(client, keys)).open_rollouts == 1


async def test_a_turn_follows_the_turn_that_it_was_planned_to_follow_or_nothing(
    client: Any, keys: Keys, rollouts: Rollouts
) -> None:
    """A broker that lost its newest writes may hold another one in that place, or the same one, sampled anew."""
    await rollouts.open([head("r")])
    first, second = turn("a"), turn("b", 0)
    assert await rollouts.add("r", first) == ("ok", 0)
    assert await rollouts.add("r", second, first) == ("ok", 1)
    lost: Any = client
    await lost.hdel(keys.rollout + "r", "turn:1", "t:b", "m:1")
    await lost.hset(keys.rollout + "r", "turns", 1)
    child = turn("c", 1)
    assert await rollouts.add("r", child, second) == ("changed", -1), "its parent is gone"
    assert await rollouts.add("r", turn("other", 0), first) == ("ok", 1)
    assert await rollouts.add("r", child, second) == ("changed", -1), "another turn has its parent's place"
    other_tokens = TokenArray([token + 1 for token in second.result.token_ids])
    again = replace(second, result=replace(second.result, token_ids=other_tokens))
    await lost.hdel(keys.rollout + "r", "turn:1", "t:other", "m:1")
    await lost.hset(keys.rollout + "r", "turns", 1)
    assert await rollouts.add("r", again, first) == ("ok", 1)
    assert await rollouts.add("r", child, second) == ("changed", -1), "its parent sampled other tokens"
    assert await rollouts.add("r", child, again) == ("ok", 2)
    assert await rollouts.add("r", child, second) == ("dup", 2)
    found = await rollouts.load("r")
    assert found is not None
    assert [(one.key, one.parent) for one in found.turns] == [("a", -1), ("b", 0), ("c", 1)]


async def _read_by(client: Any, call: Awaitable[Any]) -> int:
    """Bytes that the broker sent for it; its own answer to INFO is counted out."""

    async def sent() -> int:
        return int((await client.info("stats"))["total_net_output_bytes"])

    before = await sent()
    asking = await sent() - before
    await call
    return await sent() - before - 2 * asking


@pytest.mark.parametrize("adds", ["this gateway", "another one"])
async def test_what_a_turn_reads_does_not_grow_with_the_turns(
    client: Any, keys: Keys, rollouts: Rollouts, adds: str
) -> None:
    writer = rollouts if adds == "this gateway" else Rollouts(client, keys, partitions=1, ttl_s=600)
    await rollouts.open([head("r")])
    read: list[int] = []
    for place in range(200):
        read.append(await _read_by(client, rollouts.load("r")))
        assert await writer.add("r", turn(f"k{place:03}", place - 1)) == ("ok", place)
    late, early = median(read[190:]), median(read[9:20])  # some hold what the broker told somebody else meanwhile
    assert late <= early + 64
    assert late <= 3 * len(encode(turn("k000"))) + 64
    found = await rollouts.load("r")
    fresh = await Rollouts(client, keys, partitions=1, ttl_s=600).load("r")
    assert found == fresh
    assert found is not None
    assert [one.key for one in found.turns] == [f"k{place:03}" for place in range(200)]


async def test_a_rollout_that_the_broker_lost_and_grew_anew_is_read_anew(
    client: Any, keys: Keys, rollouts: Rollouts
) -> None:
    await rollouts.open([head("r")])
    for place in range(3):
        await rollouts.add("r", turn(f"k{place}", place - 1))
    assert await rollouts.load("r") is not None
    await client.delete(keys.rollout + "r")
    other = Rollouts(client, keys, partitions=1, ttl_s=600)
    await other.open([head("r")])
    for place, key in enumerate(["k0", "other", "k2", "k3"]):
        await other.add("r", turn(key, place - 1))
    await client.hset(keys.rollout + "r", "turn:2", encode(replace(turn("k2", 1), history="anew")))
    found = await rollouts.load("r")
    assert found is not None
    assert [one.key for one in found.turns] == ["k0", "other", "k2", "k3"]


def test_what_a_process_keeps_of_rollouts_is_bounded() -> None:
    seen = SeenRollouts(most=3 * len(encode(turn())))
    for number in range(9):
        seen.put(Rollout(head=head(f"r{number}"), turns=[turn()], state="open"), encode(turn()), len(encode(turn())))
    assert [number for number in range(9) if seen.get(f"r{number}")] == [6, 7, 8]


async def test_nobody_knows_what_was_never_opened(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    assert await rollouts.load("r") is None
    assert await rollouts.add("r", turn()) == ("unknown", -1)
    assert await rollouts.publish("r", [trajectory(head("r"))], 0) == "unknown"
    assert await rollouts.drop("r", "agent_error") == "unknown"
    assert await counts(client, keys) == {}
    assert await entries(client, keys) == []


async def test_a_producer_that_comes_after_its_agent_gets_its_place(
    client: Any, keys: Keys, rollouts: Rollouts
) -> None:
    """The broker lost the opening, and a call of the agent came before the producer read its source again."""
    open_one, closed_one = (head(f"g:{index}", group_id="g", group_size=2, index=index, truth="7") for index in (0, 1))
    assert await rollouts.open([RolloutHead.alone("g:0", "t"), RolloutHead.alone("g:1", "t")]) == ["enqueued"] * 2
    await rollouts.add("g:0", turn())
    assert await rollouts.drop("g:1", "rollout_error") == "ok"
    assert await rollouts.open([open_one, closed_one]) == ["duplicate", "enqueued"]
    assert await rollouts.open([RolloutHead.alone("g:1", "t")]) == ["duplicate"]  # never the other way round
    assert await client.pttl(keys.rollout + "g:1") == -1
    for one in (open_one, closed_one):
        found = await rollouts.load(one.rollout_id)
        assert found is not None
        assert (found.head.group_id, found.head.group_size, found.head.truth) == ("g", 2, "7")
        assert await rollouts.publish(one.rollout_id, [trajectory(one)], len(found.turns)) == "ok"
    places = [(row["g"], row["i"], row["n"]) for row in await entries(client, keys)]
    assert places == [(b"g:1", b"0", b"1"), (b"g", b"0", b"2"), (b"g", b"1", b"2")]
    assert await counts(client, keys) == {
        "enqueued": 3, "committed": 2, "dropped": 1, "dropped:rollout_error": 1, "bytes": await held(client, keys)
    }  # fmt: skip


@pytest.mark.parametrize("ending", ["publish", "drop"])
async def test_what_comes_after_the_end_is_told_so(client: Any, keys: Keys, rollouts: Rollouts, ending: str) -> None:
    made = head("r", group_id="g", group_size=4, index=3)
    assert await rollouts.open([made]) == ["enqueued"]
    assert await rollouts.open([made]) == ["duplicate"]
    await rollouts.add("r", turn())
    if ending == "publish":
        assert await rollouts.publish("r", [trajectory(made)], 1) == "ok"
    else:
        assert await rollouts.drop("r", "agent_error", "why") == "ok"
    before = await counts(client, keys)
    assert await rollouts.publish("r", [trajectory(made)], 1) == "closed"
    assert await rollouts.drop("r", "agent_error") == "closed"
    assert await rollouts.add("r", turn("late")) == ("closed", -1)
    assert await rollouts.open([made]) == ["done"]
    assert await counts(client, keys) == before
    assert len(await entries(client, keys)) == 1
    found = await rollouts.load("r")
    assert found is not None
    assert (found.state, found.turns, found.head.group_id, found.head.index) == ("closed", [], "g", 3)
    assert await rollouts.still_open() == []
    assert before["bytes"] == await held(client, keys)
    assert 0 < await client.pttl(keys.rollout + "r") <= 3600_000


async def test_an_ending_is_forgotten_in_the_end(client: Any, keys: Keys) -> None:
    rollouts = Rollouts(client, keys, partitions=1, ttl_s=600, keep_s=0.05)
    await rollouts.open([head("r")])
    await rollouts.drop("r", "agent_error")

    async def forgotten() -> bool:
        return await rollouts.load("r") is None

    await eventually(forgotten, "the closed rollout to expire")
    assert await rollouts.open([head("r")]) == ["enqueued"]


async def test_a_fork_is_published_in_parts_that_count(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    made = head("r", group_id="g", group_size=2, index=1)
    await rollouts.open([made, head("other")])
    await rollouts.add("r", turn("a"))
    await rollouts.add("r", turn("b"))
    results = [trajectory(made, part, 2) for part in range(2)]
    assert await rollouts.publish("r", results, 1) == "changed"
    assert await entries(client, keys) == []
    assert await rollouts.publish("r", results, 2) == "ok"
    rows = await entries(client, keys)
    assert [decode(SequenceResult, row.pop("r")) for row in rows] == results
    places = [{name: value.decode() for name, value in row.items()} for row in rows]
    assert places == [{"g": "g", "i": "1", "n": "2", "k": str(part), "m": "2"} for part in range(2)]
    now = await counts(client, keys)
    assert (now["enqueued"], now["committed"]) == (3, 2)
    assert "tokens" not in now, "its decode jobs have counted them"


async def test_parts_are_published_whole_and_in_order(rollouts: Rollouts) -> None:
    await rollouts.open([head("r")])
    parts = [trajectory(head("r"), part, 2) for part in range(2)]
    for wrong in ([], parts[:1], parts[::-1]):
        with pytest.raises(MessageError, match="rollout r: cannot publish parts"):
            await rollouts.publish("r", wrong, 0)


async def test_of_two_publishers_one_wins(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    names = [f"r{number}" for number in range(20)]
    await rollouts.open([head(name) for name in names])
    other = Rollouts(client, keys, partitions=1, ttl_s=600)
    for name in names:
        both = [each.publish(name, [trajectory(head(name))], 0) for each in (rollouts, other)]
        assert sorted(await asyncio.gather(*both)) == ["closed", "ok"]
    assert len(await entries(client, keys)) == (await counts(client, keys))["committed"] == 20


async def test_a_publisher_loses_against_a_turn_that_came_first(rollouts: Rollouts) -> None:
    await rollouts.open([head("r")])
    word, (added, _) = await asyncio.gather(
        rollouts.publish("r", [trajectory(head("r"))], 0), rollouts.add("r", turn())
    )
    assert (word, added) in (("ok", "closed"), ("changed", "ok"))


async def test_a_drop_leaves_a_letter_and_a_tombstone(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    await rollouts.open([head("r", group_id="g", group_size=2, index=1)])
    await rollouts.add("r", turn())
    await rollouts.drop("r", "agent_error", "tool_error: boom")
    [row] = await entries(client, keys)
    letter = decode(DeadLetter, row["d"])
    assert (letter.seq_id, letter.reason, letter.state, letter.detail) == (
        "r", "agent_error", "dropped", "tool_error: boom",
    )  # fmt: skip
    assert (row["g"], row["i"], row["n"]) == (b"g", b"1", b"2")
    [(_, kept)] = await client.xrange(keys.dropped)
    assert kept[b"d"] == row["d"]
    expected = {"enqueued": 1, "dropped": 1, "dropped:agent_error": 1, "bytes": len(row["d"])}
    assert await counts(client, keys) == expected


async def test_the_sweep_takes_those_that_nobody_called(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    silent = Rollouts(client, keys, partitions=1, ttl_s=0.01)
    await silent.open([head(f"old{number}") for number in range(101)])
    await silent.open([head("kept"), head("posted again")])
    assert await rollouts.add("kept", turn()) == ("ok", 0)  # with the longer patience: it has time again
    assert await rollouts.open([head("posted again")]) == ["duplicate"]
    await client.zadd(keys.rollouts, {"lost": 1})  # nothing else is left of it
    swept: list[int] = []

    async def all_gone() -> bool:
        swept.append(await rollouts.sweep())
        return sum(swept) == 101

    await eventually(all_gone, "the silent rollouts to be dropped")
    assert max(swept) <= 100
    assert await rollouts.sweep() == 0
    assert [one.rollout_id for one in await rollouts.still_open()] == ["kept", "posted again"]
    assert await client.zcard(keys.rollouts) == 2
    assert (await counts(client, keys))["dropped:abandoned"] == 101
    assert await rollouts.add("old7", turn()) == ("closed", -1)


async def test_credit_and_the_sources_position_are_those_of_jobs(client: Any, keys: Keys, rollouts: Rollouts) -> None:
    credit = Credit(max_in_flight=3, samples_per_version=100, max_staleness=1)
    names, cursors = [f"r{number}" for number in range(5)], [f"0:{number}" for number in range(5)]
    heads = [head(name) for name in names]
    assert await rollouts.open(heads, credit, cursors) == ["enqueued"] * 3 + ["over_credit"] * 2
    assert await client.hget(keys.source, "cursor") == b"0:2"
    assert await rollouts.load("r3") is None
    await rollouts.drop("r0", "agent_error")  # what ended makes room
    again = await rollouts.open(heads, credit, cursors, behind="0:2")
    assert again == ["done", "duplicate", "duplicate", "enqueued", "over_credit"]
    assert await client.hget(keys.source, "cursor") == b"0:3"
    with pytest.raises(SourceRewound) as rewound:
        await rollouts.open([head("r9")], credit, ["0:9"], behind="0:8")
    assert rewound.value.cursor == "0:3"
    assert await rollouts.load("r9") is None


async def test_a_producer_that_comes_back_late_opens_nothing_and_moves_no_position(client: Any, keys: Keys) -> None:
    late, successor = Ownership(client, keys, "producer"), Ownership(client, keys, "producer")
    first, second = (Rollouts(client, keys, partitions=1, ttl_s=600, producer=owner) for owner in (late, successor))
    credit, heads, cursors = Credit(100, 100, 1), [head(f"r{index}") for index in range(3)], ["0:0", "0:1", "0:2"]
    assert await late.try_acquire()
    assert await first.open(heads[:1], credit, cursors[:1]) == ["enqueued"]
    await client.delete(late.key)  # paused for longer than its claim lasts
    assert await successor.try_acquire()
    assert await second.open(heads[:2], credit, cursors[:2]) == ["duplicate", "enqueued"]
    for index in (0, 2):
        with pytest.raises(LeaseLost, match="producer"):
            await first.open(heads[index:], credit, cursors[index:], behind="0:0")
    assert await client.hget(keys.source, "cursor") == b"0:1"
    assert (await counts(client, keys))["enqueued"] == 2


async def test_open_rollouts_hold_bytes_of_the_credit(rollouts: Rollouts) -> None:
    credit = Credit(max_in_flight=9, samples_per_version=100, max_staleness=1, max_bytes=1)
    assert await rollouts.open([head("alone"), head("next")], credit) == ["enqueued", "over_credit"]


@pytest.mark.parametrize(
    "changes", [{"rollout_id": " "}, {"rollout_id": "x" * 257}, {"index": 1}, {"index": -1}, {"group_size": 0}]
)
def test_a_head_without_a_place_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="rollout"):
        head(**changes)
    assert RolloutHead.alone("r", "t") == RolloutHead(rollout_id="r", group_id="r", task="t")


DAMAGE: dict[str, dict[str, Any] | None] = {
    "no head": {"head": None},
    "a head that is junk": {"head": b"\xc1\x00"},
    "the head of another one": {"head": encode(head("other"))},
    "turns that are no number": {"turns": "two"},
    "turns beyond 64 bits": {"turns": 2**63},
    "a turn that is missing": {"turn:0": None},
    "more turns than there are": {"turns": 2**40},
    "a turn that is cut": {"turn:1": encode(turn("b", 0))[:-3]},
    "a turn that follows itself": {"turn:1": encode(turn("b", 1))},
    "a turn that follows a later one": {"turn:0": encode(turn("a", 1))},
    "a turn before the first": {"turn:0": encode(turn("a", -2))},
    "no state, and no place": {"state": None},
    "closed, at no place": {"state": "closed", "n": "x"},
    "another type": None,
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_a_damaged_rollout_is_named_and_costs_no_other(
    client: Any, keys: Keys, rollouts: Rollouts, name: str
) -> None:
    await rollouts.open([head("r"), head("whole")])
    await rollouts.add("r", turn("a"))
    await rollouts.add("r", turn("b", 0))
    key, fields = keys.rollout + "r", DAMAGE[name]
    if fields is None:
        await client.set(key, "text", keepttl=False)
    for field, value in (fields or {}).items():
        await (client.hdel(key, field) if value is None else client.hset(key, field, value))
    with pytest.raises(MessageError, match=f"rollout r: .*{key}"):
        await rollouts.load("r")
    assert [one.rollout_id for one in await rollouts.still_open() if one.rollout_id != "r"] == ["whole"]
    assert await rollouts.load("whole") is not None
