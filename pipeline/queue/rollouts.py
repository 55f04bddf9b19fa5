"""The state of agent rollouts: opened, grown turn by turn, then published or dropped, once.

    open ─▶ add ─▶ add ─▶ … ─▶ publish ─▶ result stream ─▶ consumer
                               drop ────▶ tombstone, dropped(reason)

- A rollout counts as enqueued once opened, so an open one keeps the run from ending.
- One of an evaluation takes no credit and counts in nothing but `evaluated`; its end goes to the evaluator.
- Its turns count in `bytes`; at its end they are subtracted, and the bytes of its results are added.
- Calls after the end return `closed` for `keep_s` seconds.
- Every call is idempotent: after a lost answer it can be repeated.
- A process reads each turn once: it caches open rollouts and asks only for newer turns.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.rollouts import (
    Add,
    AddedTurn,
    DropRollout,
    NewRollout,
    Open,
    PublishRollout,
    RolloutNames,
    SweepRollouts,
)
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import MessageError, UnknownSchema
from sluice.pipeline.queue.types import NO_LIMIT, Credit, Outcome, why_refused
from sluice.pipeline.wire.codec import Unreadable, integer, integer_or, shown
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import RolloutHead, SequenceResult, Turn, decode, encode

__all__ = ["Rollout", "RolloutHead", "Rollouts", "Turn", "Word"]

Word = Literal["ok", "closed", "changed", "unknown"]
"""closed: it has ended, a short while ago; changed: it has other turns by now; unknown: there is no such rollout."""

_SWEPT = 100  # rollouts at a time
_PAGE = 500
_MOST_AT_ONCE = 10_000  # turns requested by name
_DETAIL_CHARS = 2000
_SEEN_BYTES = 64 << 20  # of encoded turns cached per process


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's record of one; of a closed one only its position in its group is left."""

    head: RolloutHead
    turns: list[Turn]
    state: Literal["open", "closed"]


class Seen(NamedTuple):
    """An open rollout as of the last read; it has at least one turn."""

    rollout: Rollout
    newest: bytes  # its last turn, encoded
    size: int  # bytes


def mark_of(turn: Turn) -> str:
    """Tells a turn from another one, and from a repeat of it that sampled other tokens."""
    return sha256(turn.key.encode() + bytes(turn.result.token_ids)).hexdigest()


class SeenRollouts:
    """LRU cache of rollouts, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def get(self, rollout_id: str) -> Seen | None:
        """None: read all of it."""
        return self._seen.get(rollout_id)

    def put(self, rollout: Rollout, newest: bytes, size: int) -> None:
        """`size`: encoded size of the rollout."""
        rollout_id = rollout.head.rollout_id
        self.forget(rollout_id)
        self._seen[rollout_id] = Seen(rollout, newest, size)
        self._size += size
        while self._size > self._most:
            self.forget(next(iter(self._seen)))

    def forget(self, rollout_id: str) -> None:
        """It has ended, or its history changed."""
        if seen := self._seen.pop(rollout_id, None):
            self._size -= seen.size


class Rollouts:
    """The rollouts of one run; one without a call for `ttl_s` is abandoned. `producer`: as in JobQueue."""

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        *,
        partitions: int,
        ttl_s: float,
        keep_s: float = 3600.0,
        producer: Ownership | None = None,
    ) -> None:
        self._client: Any = client
        self._keys, self._scripts, self._producer = keys, Scripts(client), producer
        self._partitions, self._ttl_s = partitions, ttl_s
        self._seen = SeenRollouts(_SEEN_BYTES)
        self.unreadable = Unreadable()
        self._names = RolloutNames(
            counts=keys.counts,
            dropped=keys.dropped,
            source=keys.source,
            open=keys.rollouts,
            evaluated=keys.evaluated,
            open_evaluated=keys.evaluated_rollouts,
            producer=f"{keys.owner}producer",
            rollout_of=keys.rollout,
            ttl_ms=int(ttl_s * 1000),
            keep_ms=int(keep_s * 1000),
        )

    @classmethod
    def of(cls, client: Redis, keys: Keys, config: Config, producer: Ownership | None = None) -> Rollouts:
        """As this run's processes read and write them."""
        ttl_s = config.gateway.rollout_ttl_s
        return cls(client, keys, partitions=config.consumer.count, ttl_s=ttl_s, producer=producer)

    async def open(
        self, heads: Sequence[RolloutHead], credit: Credit = NO_LIMIT, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Open rollouts in order; after the first `over_credit`, all that follow are `over_credit` too.

        `duplicate`: already open; `done`: closed a short while ago. `cursors[i]` is stored as the source's
        position once rollout i is open. Raises the same as JobQueue.enqueue.
        """
        rows = [
            NewRollout(
                id=head.rollout_id,
                head=encode(replace(head, opened_at=time.time())),
                stream=self._keys.result_stream(head.group_id, self._partitions),
                group=head.group_id,
                index=head.index,
                size=head.group_size,
                cursor=cursors[i] if cursors else "",
                evaluated="" if head.pinned_version is None else "1",
            )
            for i, head in enumerate(heads)
        ]
        request = Open(
            max_in_flight=credit.max_in_flight,
            max_bytes=credit.max_bytes,
            samples_per_version=credit.samples_per_version,
            max_staleness=credit.max_staleness,
            cursor_before=behind,
            nonce=self._producer.nonce if self._producer else "",
            rollouts=rows,
        )
        opened = await self._scripts.ask(self._names, request)
        if opened.refused is not None:
            raise await why_refused(self._scripts, self._names.producer, opened.refused)
        return opened.outcomes

    async def load(self, rollout_id: str) -> Rollout | None:
        """The whole rollout, as a consistent snapshot; None if there is none.

        Raises UnknownSchema if a newer release wrote it, MessageError if it is damaged.
        """
        key = f"{self._keys.rollout}{rollout_id}"
        try:
            return await self._load(rollout_id, key)
        except UnknownSchema:
            raise
        except (MessageError, ResponseError) as error:  # ResponseError: the key has another type
            self._seen.forget(rollout_id)
            raise MessageError(
                f"rollout {rollout_id}: damaged in the broker ({error}); delete the key {key}"
            ) from error

    async def _load(self, rollout_id: str, key: str) -> Rollout | None:
        if (seen := self._seen.get(rollout_id)) and (grown := await self._grown(key, seen)):
            return grown
        self._seen.forget(rollout_id)
        found = cast("dict[bytes, bytes]", await self._client.hgetall(key))
        rollout = read_rollout(rollout_id, found) if found else None
        if rollout and rollout.turns:
            sizes = (len(found[b"turn:%d" % at]) for at in range(len(rollout.turns)))
            newest = found[b"turn:%d" % (len(rollout.turns) - 1)]
            self._seen.put(rollout, newest, len(found[b"head"]) + sum(sizes))
        return rollout

    async def _grown(self, key: str, seen: Seen) -> Rollout | None:
        """The cached rollout plus newer turns; None if the broker has another history.

        The broker may have lost its newest writes, and the rollout grew anew: its last turn shows this, byte for byte,
        as it records when it was decoded. The head changes only with the group (rollout_open.lua).
        """
        known, count = seen.rollout, len(seen.rollout.turns)
        names = ["state", "g", "turns", f"turn:{count - 1}", f"turn:{count}"]
        state, group, num_turns, newest, following = await self._client.hmget(key, names)
        if state != b"open" or group != known.head.group_id.encode() or newest != seen.newest:
            return None
        stored = integer_or(num_turns, -1, most=count + _MOST_AT_ONCE)
        if stored < count:  # fewer than seen, too many more, or not a number
            return None
        raw: list[bytes | None] = [following] if stored > count else []
        if stored > count + 1:
            raw += await self._client.hmget(key, [f"turn:{place}" for place in range(count + 1, stored)])
        came = [one for one in raw if one is not None]
        if len(came) < len(raw):  # closed meanwhile
            return None
        return self._remember(seen, [_turn(count + at, one) for at, one in enumerate(came)], came)

    def _remember(self, seen: Seen, turns: Sequence[Turn], raw: Sequence[bytes]) -> Rollout:
        known = seen.rollout
        rollout = Rollout(head=known.head, turns=[*known.turns, *turns], state="open")
        self._seen.put(rollout, raw[-1] if raw else seen.newest, seen.size + sum(map(len, raw)))
        return rollout

    async def add(self, rollout_id: str, turn: Turn, parent: Turn | None = None) -> AddedTurn:
        """Add a turn and return its number, -1 without one: there is no open rollout, or `changed`.

        `dup` is a turn with a known key. `changed`: the broker has lost the `parent` that it was planned to follow.
        """
        raw, behind = encode(turn), "" if parent is None else mark_of(parent)
        request = Add(id=rollout_id, key=turn.key, turn=raw, mark=mark_of(turn), parent=turn.parent, parent_mark=behind)
        added = await self._scripts.ask(self._names, request)
        if added.word == "ok" and (seen := self._seen.get(rollout_id)) and len(seen.rollout.turns) == added.place:
            self._remember(seen, [turn], [raw])
        return added

    async def publish(self, rollout_id: str, results: Sequence[SequenceResult], num_turns: int) -> Word:
        """Publish its trajectories as results and close it; `changed` if it doesn't have `num_turns` turns.

        `results` are its parts in order, at least one; raises MessageError otherwise.
        """
        places = [(result.part, result.parts) for result in results]
        if not results or places != [(part, len(results)) for part in range(len(results))]:
            raise MessageError(f"rollout {rollout_id}: cannot publish parts {places}; give all of them, in order")
        request = PublishRollout(id=rollout_id, turns=num_turns, results=[encode(result) for result in results])
        return cast(Word, await self._scripts.ask(self._names, request))

    async def drop(self, rollout_id: str, reason: str, detail: str = "") -> Word:
        """Drop it, with a tombstone, so that its group completes."""
        request = DropRollout(id=rollout_id, reason=reason, detail=detail[:_DETAIL_CHARS])
        return cast(Word, await self._scripts.ask(self._names, request))

    async def sweep(self) -> int:
        """Drop those without a call for `ttl_s`, reason `abandoned`, at most 100; returns how many."""
        detail = f"no call for {self._ttl_s:g} s, and it was not finished"
        return await self._scripts.ask(self._names, SweepRollouts(most=_SWEPT, detail=detail))

    async def is_open(self, rollout_id: str) -> bool:
        return await self._client.hget(f"{self._keys.rollout}{rollout_id}", "state") == b"open"

    async def forget(self, rollout_id: str) -> None:
        """A closed one may be opened again."""
        if not await self.is_open(rollout_id):
            await self._client.delete(f"{self._keys.rollout}{rollout_id}")

    async def still_open(self, known: Collection[str] = ()) -> list[RolloutHead]:
        """The open ones, longest idle first, without those of an evaluation and those in `known` when it is called."""
        skipped = {rollout_id.encode() for rollout_id in known}
        every = cast("list[bytes]", await self._client.zrange(self._keys.rollouts, 0, -1))
        ids = [rollout_id for rollout_id in every if rollout_id not in skipped]
        heads: list[RolloutHead] = []
        for start in range(0, len(ids), _PAGE):
            pipe: Any = self._client.pipeline(transaction=False)
            for rollout_id in ids[start : start + _PAGE]:
                pipe.hget(self._keys.rollout.encode() + rollout_id, "head")
            found = cast("list[bytes | Exception | None]", await pipe.execute(raise_on_error=False))
            for rollout_id, raw in zip(ids[start : start + _PAGE], found, strict=True):
                if raw is None:  # it ended meanwhile
                    continue
                try:
                    heads.append(_head(rollout_id.decode(errors="replace"), raw))
                except (MessageError, ResponseError) as error:
                    self.unreadable.skip(self._keys.rollout, rollout_id, error)
        return heads


def read_rollout(rollout_id: str, found: dict[bytes, bytes]) -> Rollout:
    """From the hash's fields; raises MessageError."""
    if (state := found.get(b"state", b"")) not in (b"open", b"closed"):
        raise MessageError(f"its field state is {shown(state)!r}, neither open nor closed")
    if state == b"closed":
        group = found.get(b"g", b"").decode(errors="replace")
        size, index = (integer(found.get(name), f"its field {name.decode()}") for name in (b"n", b"i"))
        head = RolloutHead(rollout_id=rollout_id, group_id=group, group_size=size, index=index, task="")
        return Rollout(head=head, turns=[], state="closed")
    head = _head(rollout_id, found.get(b"head", b""))
    turns = [_turn(at, found.get(b"turn:%d" % at)) for at in range(integer(found.get(b"turns"), "its field turns"))]
    return Rollout(head=head, turns=turns, state="open")


def _head(rollout_id: str, raw: bytes | Exception) -> RolloutHead:
    if isinstance(raw, Exception):
        raise raw
    head = decode(RolloutHead, raw)
    if head.rollout_id != rollout_id:
        raise MessageError(f"its head is that of rollout {head.rollout_id!r:.80}")
    return head


def _turn(at: int, raw: bytes | None) -> Turn:
    if raw is None:
        raise MessageError(f"turn {at} is missing")
    turn = decode(Turn, raw)
    if not -1 <= turn.parent < at:
        raise MessageError(f"turn {at} follows turn {turn.parent}, which is not before it")
    return turn
