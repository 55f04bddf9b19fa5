"""The state of agent rollouts: opened, grown turn by turn, then published or dropped, once.

    open ─▶ add ─▶ add ─▶ … ─▶ publish ─▶ result stream ─▶ consumer
                               drop ────▶ tombstone, dropped(reason)

- A rollout counts as enqueued from its opening, so an open one keeps the run from ending.
- All that it holds counts in `bytes`; at its end that leaves, and what its results hold comes.
- Whoever comes after the end is told `closed` for `keep_s` seconds.
- Every call may be repeated: a lost answer changes nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, cast

from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline.broker import Scripts
from pipeline.errors import MessageError
from pipeline.jobs.types import NO_LIMIT, Credit, Outcome, SourceRewound
from pipeline.keys import Keys
from pipeline.messages import SequenceResult, decode, encode
from pipeline.rollout_types import Rollout, RolloutHead, Turn, Word

__all__ = ["Rollout", "RolloutHead", "Rollouts", "Turn", "Word"]

_SWEPT = 100  # rollouts at a time
_PAGE = 500
_DETAIL_CHARS = 2000


class Rollouts:
    """The rollouts of one run; `ttl_s` without a call makes one abandoned."""

    def __init__(self, client: Redis, keys: Keys, *, partitions: int, ttl_s: float, keep_s: float = 3600.0) -> None:
        self._client: Any = client
        self._keys, self._scripts = keys, Scripts(client)
        self._partitions, self._ttl_s = partitions, ttl_s
        self._script_keys = [keys.counts, keys.dropped, keys.latest, keys.source, keys.rollouts]
        self._script_args: list[Any] = [keys.rollout, int(ttl_s * 1000), int(keep_s * 1000)]

    async def open(
        self, heads: Sequence[RolloutHead], credit: Credit = NO_LIMIT, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Open rollouts in order; after the first `over_credit` all that follow are `over_credit` too.

        `duplicate`: it is open; `done`: it was closed a short while ago. `cursors[i]` is stored as the source's
        position once rollout i is open. Raises SourceRewound when the stored position is before `behind`.
        """
        args: list[Any] = [credit.max_in_flight, credit.max_bytes, credit.samples_per_version, credit.max_staleness]
        args.append(behind)
        for i, head in enumerate(heads):
            stream = self._keys.result_stream(head.group_id, self._partitions)
            args += [head.rollout_id, encode(replace(head, opened_at=time.time())), stream]
            args += [head.group_id, head.index, head.group_size, cursors[i] if cursors else ""]
        answer = [item.decode() for item in await self._run("open", args)]
        if answer and answer[0] == "rewound":
            raise SourceRewound(answer[1])
        return cast("list[Outcome]", answer)

    async def load(self, rollout_id: str) -> Rollout | None:
        """All of it, as of one moment; None when there is none. Raises UnknownSchema for one of a newer release."""
        found = cast("dict[bytes, bytes]", await self._client.hgetall(f"{self._keys.rollout}{rollout_id}"))
        if not found:
            return None
        if found[b"state"] != b"open":
            group, size, index = found[b"g"].decode(), int(found[b"n"]), int(found[b"i"])
            head = RolloutHead(rollout_id=rollout_id, group_id=group, group_size=size, index=index, task="")
            return Rollout(head=head, turns=[], state="closed")
        turns = [decode(Turn, found[b"turn:%d" % place]) for place in range(int(found[b"turns"]))]
        return Rollout(head=decode(RolloutHead, found[b"head"]), turns=turns, state="open")

    async def add(self, rollout_id: str, turn: Turn) -> tuple[Literal["ok", "dup", "closed", "unknown"], int]:
        """One more turn, and its number; `dup` is a turn whose key is known. -1 where there is no open rollout."""
        word, place = await self._run("add", [rollout_id, turn.key, encode(turn)])
        return word.decode(), int(place)

    async def publish(self, rollout_id: str, results: Sequence[SequenceResult], num_turns: int) -> Word:
        """Put its trajectories out as results and close it; `changed` when it does not have `num_turns` turns.

        `results` are its parts in order, at least one; raises MessageError where they are not.
        """
        places = [(result.part, result.parts) for result in results]
        if not results or places != [(part, len(results)) for part in range(len(results))]:
            raise MessageError(f"rollout {rollout_id}: cannot publish parts {places}; give all of them, in order")
        answer = await self._run("publish", [rollout_id, num_turns, *map(encode, results)])
        return cast(Word, answer.decode())

    async def drop(self, rollout_id: str, reason: str, detail: str = "") -> Word:
        """End it as dropped, with a tombstone, so that its group completes."""
        return cast(Word, (await self._run("drop", [rollout_id, reason, detail[:_DETAIL_CHARS]])).decode())

    async def sweep(self) -> int:
        """Drop those without a call for `ttl_s`, reason `abandoned`, at most 100; returns how many."""
        return int(await self._run("sweep", [_SWEPT, f"no call for {self._ttl_s:g} s, and nobody finished it"]))

    async def still_open(self) -> list[RolloutHead]:
        """Those that have not ended, the longest silent ones first."""
        ids = cast("list[bytes]", await self._client.zrange(self._keys.rollouts, 0, -1))
        heads: list[RolloutHead] = []
        for start in range(0, len(ids), _PAGE):
            pipe: Any = self._client.pipeline(transaction=False)
            for rollout_id in ids[start : start + _PAGE]:
                pipe.hget(self._keys.rollout.encode() + rollout_id, "head")
            heads += [decode(RolloutHead, raw) for raw in await pipe.execute() if raw]  # None: it ended meanwhile
        return heads

    async def _run(self, name: str, args: Sequence[Any]) -> Any:
        return await self._scripts.run(f"rollout_{name}", self._script_keys, [*self._script_args, *args])
