"""Result and batch streams: read by one owner at a time, handed off atomically, never trimmed; and that ownership.

    results:{p} ──ResultStream.read──▶ consumer ──hand_off (one script)──▶ batches ──▶ trainer ──ack──▶ gone

- Roles that only one process holds at a time (a consumer per partition, the trainer) have an owner, whose nonce fences
  every effect: a paused owner that comes back late is refused by the scripts.
- The reader holds its role's `Ownership`; everything a dead reader had taken is taken over.
- Entries leave a stream only through hand_off or ack, after their effect.
- A reader that lost its role takes nothing more: its successor couldn't see what it took.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import (
    Ack,
    AckedBatch,
    AckKeys,
    Disown,
    Drop,
    Handoff,
    HandoffKeys,
    Own,
    Read,
    RoleKey,
    Stepped,
    StreamKeys,
)
from sluice.pipeline.errors import BrokerDataGone, BrokerError, DeadlineExceeded, LeaseLost, ResultsLost, SluiceError
from sluice.pipeline.wire.keys import BATCH_GROUP, RESULT_GROUP, Keys
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, encode
from sluice.pipeline.wire.waits import Waiting, WaitKind

TTL_S = 5.0
_POLL_S = 0.2


async def why_fenced(scripts: Scripts, key: str) -> SluiceError:
    """The error for a process that a script refused as this role's owner: another has it, or the data are gone."""
    role = key.rpartition("owner:")[2]
    if await scripts.client.exists(key, f"{key}:last"):
        return LeaseLost(f"{role}: another process took over this role; stopping")
    return BrokerDataGone(
        f"{role}: the broker's data are gone, including this process's claim on the role. Restart the process: rows "
        "are read again, trained sequences stay trained, and work in progress is redone"
    )


class Ownership:
    """Holds one role while its `keep` task runs."""

    def __init__(self, client: Redis, keys: Keys, role: str) -> None:
        self._scripts = Scripts(client)
        self.role = role
        self.key = f"{keys.owner}{role}"
        self._held = self._released = False
        self.nonce = secrets.token_hex(8)

    async def acquire(self, deadline_s: float, waiting: Waiting) -> None:
        """Take the role, waiting for an earlier owner's claim to expire; DeadlineExceeded names it.

        Counts only the time between questions: a broker outage isn't the other process's fault.
        """
        waited_s = 0.0
        while not await self.try_acquire():
            waiting(WaitKind.ROLE, self.role)
            if waited_s >= deadline_s:
                raise DeadlineExceeded(f"{self.role}: another process has held this role for {deadline_s:.0f} s")
            began = time.monotonic()
            await asyncio.sleep(_POLL_S)
            waited_s += time.monotonic() - began
        waiting(None)

    async def keep(self) -> None:
        """Renew until released or cancelled; raises as `why_fenced` when the role is lost."""
        while not self._released:
            await asyncio.sleep(TTL_S / 4)
            if not self._released:
                await self.confirm()

    async def confirm(self) -> None:
        """Call it before an effect that no script fences (files); raises as `why_fenced` when the role is lost."""
        if not await self.try_acquire() and not self._released:
            raise await why_fenced(self._scripts, self.key)

    async def release(self) -> None:
        """Give the role up immediately; a renewal in flight doesn't retake it."""
        self._released = True
        await self._scripts.ask(RoleKey(owner=self.key), Disown(nonce=self.nonce))

    async def try_acquire(self) -> bool:
        """Take or renew the role; False while another process holds it, and permanently once one has held it since."""
        request = Own(nonce=self.nonce, ttl_ms=int(TTL_S * 1000), renew=self._held)
        ours = bool(await self._scripts.ask(RoleKey(owner=self.key), request))
        self._held = self._held or ours
        return ours


_PAGE = 256


@dataclass(frozen=True)
class Entry:
    """One raw stream entry."""

    entry_id: str
    fields: dict[bytes, bytes]

    @property
    def num_bytes(self) -> int:
        """The bytes its message occupies in the broker, as credit counts them."""
        return max(len(self.fields.get(name, b"")) for name in (b"r", b"d", b"b"))


class StreamReader:
    """Reads one stream as the only member of its group; `owner` fences every read."""

    def __init__(self, client: Redis, stream: str, group: str, name: str, owner: Ownership | None = None) -> None:
        self._client, self.stream, self.group, self.name = client, stream, group, name
        self._owner, self._scripts = owner, Scripts(client)
        self._last = "0-0"  # newest entry seen
        self.held: set[str] = set()  # taken, not yet acked

    async def open(self) -> list[Entry]:
        """Create the group if needed and take over everything an earlier reader left unfinished, in order."""
        try:
            await self._client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        found = await self._all_pending()
        self._last = found[-1].entry_id if found else self._last
        return self._fresh(found)

    async def read(self, count: int, block_ms: int) -> list[Entry]:
        """New entries; an empty list after `block_ms` without any. Raises as `why_fenced` when the role is lost."""
        try:
            found = await self._take(count)
            if not found:
                await self._client.xread({self.stream: self._last}, count=1, block=block_ms)
                found = await self._take(count)
        except (ResponseError, BrokerError) as error:
            if "NOGROUP" not in str(error):
                raise
            return await self.open()
        self._last = found[-1].entry_id if found else self._last
        return self._fresh(found)

    def release(self, entry_ids: Sequence[str]) -> None:
        """Mark these as acked."""
        self.held.difference_update(entry_ids)

    def forget(self) -> None:
        """Forget everything held, so it is read again."""
        self.held.clear()
        self._last = "0-0"

    def _fresh(self, found: list[Entry]) -> list[Entry]:
        """Drops entries already held: a broker that lost its newest part delivers them again."""
        fresh = [entry for entry in found if entry.entry_id not in self.held]
        self.held.update(entry.entry_id for entry in fresh)
        return fresh

    async def _all_pending(self) -> list[Entry]:
        """Everything the group's readers hold, claimed for this reader."""
        found: list[Entry] = []
        start = "0-0"
        while True:
            answer = cast(
                "list[Any]",
                await self._client.xautoclaim(
                    self.stream, self.group, self.name, min_idle_time=0, start_id=start, count=_PAGE
                ),
            )
            found += _entries(answer[1])
            start = answer[0].decode()
            if start == "0-0":
                return found

    async def _take(self, count: int) -> list[Entry]:
        owner = self._owner.key if self._owner else None
        nonce = self._owner.nonce if self._owner else ""
        request = Read(nonce=nonce, group=self.group, reader=self.name, count=count, last_seen=self._last)
        found = await self._scripts.ask(StreamKeys(stream=self.stream, owner=owner), request)
        if found is None:
            raise await why_fenced(self._scripts, owner or "")
        if not found.rows and found.pending > len(self.held):
            return await self._all_pending()
        return _entries(found.rows)

    async def depth(self) -> int:
        """Entries in the stream, taken or not."""
        return int(await cast("Awaitable[int]", self._client.xlen(self.stream)))


def result_reader(client: Redis, keys: Keys, partition: int, name: str, owner: Ownership | None = None) -> StreamReader:
    """The reader of one partition of results."""
    return StreamReader(client, f"{keys.results}{partition}", RESULT_GROUP, name, owner)


def batch_reader(client: Redis, keys: Keys, name: str, owner: Ownership | None = None) -> StreamReader:
    """The trainer's reader."""
    return StreamReader(client, keys.batches, BATCH_GROUP, name, owner)


async def hand_off(
    scripts: Scripts,
    keys: Keys,
    *,
    reader: StreamReader,
    owner_key: str,
    nonce: str,
    batch: TrainingBatch,
    result_ids: Sequence[str],
    result_bytes: int,
    drops: Sequence[DeadLetter],
) -> Literal["ok", "dup"]:
    """Publish a batch, record drops, ack and delete the results behind it, in one step.

    `result_bytes`: what those results held in the broker. Raises as `why_fenced` if the partition belongs to another
    consumer; ResultsLost, with nothing done, if one of the results no longer exists. A repeat of the same batch_id is
    `dup`.
    """
    names = HandoffKeys(
        results=reader.stream, batches=keys.batches, counts=keys.counts, owner=owner_key, dropped=keys.dropped
    )
    request = Handoff(
        nonce=nonce,
        group=reader.group,
        reader=reader.name,
        batch_id=batch.batch_id,
        batch=encode(batch) if batch.samples else b"",
        samples=len(batch.samples),
        result_bytes=result_bytes,
        result_ids=list(result_ids),
        drops=_drops(drops),
    )
    answer = await scripts.ask(names, request)
    if answer == "fenced":
        raise await why_fenced(scripts, owner_key)
    if answer == "lost":
        raise ResultsLost(f"{reader.stream}: results that were already read are gone; reading from the start")
    reader.release(result_ids)
    return cast("Literal['ok', 'dup']", answer)


async def ack_batches(
    scripts: Scripts,
    keys: Keys,
    owner_key: str,
    nonce: str,
    batches: Sequence[tuple[str, int]],
    drops: Mapping[str, Sequence[DeadLetter]] | None = None,
    stepped: Stepped = Stepped(),  # noqa: B008  (immutable)
) -> int:
    """Ack (stream id, number of samples) pairs; returns the samples counted as trained. Raises as `why_fenced`.

    `drops`: by stream id, letters of the samples that the trainer dropped from that batch; they count as dropped.
    `stepped`: what stays in steps without an ack.
    """
    names = AckKeys(batches=keys.batches, counts=keys.counts, owner=owner_key, dropped=keys.dropped)
    acked = [AckedBatch(each, samples, _drops((drops or {}).get(each, ()))) for each, samples in batches]
    counted = await scripts.ask(names, Ack(nonce=nonce, group=BATCH_GROUP, stepped=stepped, batches=acked))
    if counted < 0:
        raise await why_fenced(scripts, owner_key)
    return counted


def _drops(letters: Sequence[DeadLetter]) -> list[Drop]:
    return [Drop(letter.reason, encode(letter)) for letter in letters]


def _entries(rows: Sequence[Any]) -> list[Entry]:
    """Redis 6.2 reports deleted entries as None; they are skipped."""
    return [Entry(row[0].decode(), row[1]) for row in rows if row is not None and row[1] is not None]
