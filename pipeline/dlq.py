"""Dead letters: look at them, send them back to the queue, throw them away.

- A job's rows stand together in the stream (a burial), its payload with the first; see lua/bury.lua and unbury.lua.
- A replay is a new job under a new id: the old group was completed by tombstones.
- Every read is a page at a time. What is replayed or dropped is bounded by the stream's end at the start: a job that
  dies again at once is not replayed again.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.broker.connection import Scripts
from pipeline.config.types import Config
from pipeline.errors import BrokerRefused, MessageError
from pipeline.jobs.envelope import Envelope, arq_payload, read_envelope
from pipeline.jobs.queue import JobQueue
from pipeline.wire.codec import integer_or
from pipeline.wire.keys import Keys
from pipeline.wire.messages import DeadLetter, decode

_PAGE = 100
_PASSES = 3
_REPLAYS = "replays"  # field of counts: the number of the newest replay
_REPLAY_MARK = re.compile(rb"~r\d+$")
NO_PAYLOAD = "its payload is gone; it can only be dropped"
TAKEN_ELSEWHERE = "no longer there: somebody else replayed or dropped it"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One dead (or dropped) sequence as it lies in the stream."""

    entry_id: str
    letter: DeadLetter
    job: bytes  # its id, as it is on the server
    index: int
    n: int  # of its job; 0 = not known
    payload: bytes = b""  # on the first row of a job

    @property
    def job_id(self) -> str:
        """Fit for people."""
        return self.job.decode(errors="replace")

    @property
    def key(self) -> tuple[bytes, int, float]:
        """Stays the same when the row moves."""
        return self.job, self.index, self.letter.at


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are meant; the parts are alternatives."""

    seq_ids: frozenset[str] = frozenset()
    job: str | None = None
    reason: str | None = None
    everything: bool = False

    def takes(self, row: Row) -> bool:
        """Whether this row is meant."""
        return (
            self.everything
            or row.letter.seq_id in self.seq_ids
            or (self.job is not None and row.job_id == self.job)
            or (self.reason is not None and row.letter.reason == self.reason)
        )


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job's selected rows; `problem` says why nothing was done."""

    job_id: str
    sequences: list[str]
    new_job_id: str | None = None
    problem: str | None = None


Act = Callable[[list[Row], list[Row]], Awaitable[Done | None]]


class DeadLetters:
    """The dead letters of one run."""

    def __init__(self, client: Redis, config: Config) -> None:
        self._client: Any = client
        self.keys = Keys(config.run)
        worker = config.worker
        self._queue = JobQueue(client, self.keys, partitions=config.consumer.count, keep_result_s=worker.keep_result_s)
        self._scripts = Scripts(client)

    async def rows(self, *, dropped: bool = False, until: str = "+") -> AsyncIterator[Row]:
        """Oldest first, a page at a time."""
        start = "-"
        while True:
            stream = self.keys.dropped if dropped else self.keys.dead
            page = await self._page(self._client.xrange(stream, start, until, count=_PAGE), stream)
            for entry_id, fields in page:
                yield _row(entry_id.decode(), fields)
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"

    async def newest(self, before: str = "+", count: int = _PAGE, *, dropped: bool = False) -> list[Row]:
        """Newest first; `before` is the entry id of the last row of the page before."""
        end = before if before == "+" else f"({before}"
        stream = self.keys.dropped if dropped else self.keys.dead
        page = await self._page(self._client.xrevrange(stream, end, "-", count=count), stream)
        return [_row(entry_id.decode(), fields) for entry_id, fields in page]

    async def _page(self, question: Awaitable[Any], stream: str) -> list[Any]:
        """Raises BrokerRefused where the key is no stream."""
        try:
            return cast("list[Any]", await question)
        except ResponseError as error:
            raise BrokerRefused(f"{stream}: {error}; it must be a stream: rename or delete it") from error

    async def burials(self, until: str = "+") -> AsyncIterator[list[Row]]:
        """The rows of each burial."""
        held: list[Row] = []
        async for row in self.rows(until=until):
            if held and (row.job != held[0].job or row.payload):
                yield held
                held = []
            held.append(row)
        if held:
            yield held

    async def find(
        self, seq_id: str, *, dropped: bool = False, entry_id: str | None = None
    ) -> tuple[Row, bytes] | None:
        """The newest row of this sequence, and its job's payload; at once where its entry id is known."""
        row = await self._at(entry_id) if entry_id else None
        if row is None or row.letter.seq_id != seq_id:
            row = await self._newest_of(seq_id, dropped=dropped)
        return row and (row, b"" if dropped else await self._payload(row))

    async def _at(self, entry_id: str) -> Row | None:
        page = cast("list[Any]", await self._client.xrange(self.keys.dead, entry_id, entry_id))
        return _row(entry_id, page[0][1]) if page else None

    async def _newest_of(self, seq_id: str, *, dropped: bool) -> Row | None:
        async for row in self._back(dropped=dropped):
            if row.letter.seq_id == seq_id:
                return row
        return None

    async def _payload(self, row: Row) -> bytes:
        """With the first row of its burial, which is this one or stands before it."""
        if row.payload:
            return row.payload
        async for one in self._back(row.entry_id, min(_PAGE, max(1, row.index))):
            if one.payload or one.job != row.job:
                return one.payload if one.job == row.job else b""
        return b""

    async def _back(self, before: str = "+", count: int = _PAGE, *, dropped: bool = False) -> AsyncIterator[Row]:
        """Newest first, `count` rows at a time."""
        while page := await self.newest(before, count, dropped=dropped):
            for row in page:
                yield row
            before = page[-1].entry_id

    async def replay(self, selection: Selection) -> list[Done]:
        """Send rows back to the queue, those of one job as one new job."""
        return await self._each(selection, self._replay)

    async def drop(self, selection: Selection) -> list[Done]:
        """Throw rows away."""
        return await self._each(selection, self._drop)

    async def _each(self, selection: Selection, act: Act) -> list[Done]:
        """Act on every burial with selected rows; one that changed under our hands is looked up again."""
        done: list[Done] = []
        missing: dict[tuple[bytes, int, float], Row] = {}
        for again in range(_PASSES):
            changed = False
            newest = await self._page(self._client.xrevrange(self.keys.dead, count=1), self.keys.dead)
            async for rows in self.burials(newest[0][0].decode() if newest else "+"):
                chosen = [row for row in rows if (row.key in missing if again else selection.takes(row))]
                outcome = await act(rows, chosen) if chosen else None
                if outcome is not None:
                    done.append(outcome)
                    for row in chosen:
                        missing.pop(row.key, None)
                elif chosen:
                    changed = True
                    missing |= {row.key: row for row in chosen}
            if not changed:
                break
        lost = [Done(job_id=row.job_id, sequences=_names([row]), problem=TAKEN_ELSEWHERE) for row in missing.values()]
        return done + lost

    async def _replay(self, rows: list[Row], chosen: list[Row]) -> Done | None:
        payload, job_id = rows[0].payload, rows[0].job_id
        if not payload:
            return Done(job_id=job_id, sequences=_names(chosen), problem=NO_PAYLOAD)
        envelope = read_envelope(job_id, payload)
        if envelope.job is None:
            chosen = rows  # n cannot be changed in what cannot be read: it goes back whole
        while True:
            new_id = await self._new_id(rows[0].job)
            answer = await self._run("replay", [new_id, *_remade(envelope, payload, new_id, len(chosen))], rows, chosen)
            if answer == "gone":
                return None
            if answer == "ok":
                return Done(job_id=job_id, sequences=_names(chosen), new_job_id=new_id.decode(errors="replace"))

    async def _new_id(self, job: bytes) -> bytes:
        """One number for the whole run: no id comes twice, however long its tombstone is gone."""
        number = int(await self._client.hincrby(self.keys.counts, _REPLAYS, 1))
        return _REPLAY_MARK.sub(b"", job) + b"~r%d" % number

    async def _drop(self, rows: list[Row], chosen: list[Row]) -> Done | None:
        answer = await self._run("discard", [], rows, chosen)
        return Done(job_id=rows[0].job_id, sequences=_names(chosen)) if answer == "ok" else None

    async def _run(self, name: str, args: list[Any], rows: list[Row], chosen: list[Row]) -> str:
        leaving = [row.entry_id for row in chosen]
        payload_leaves = bool(rows[0].payload) and rows[0].entry_id in leaving
        staying = [row.entry_id for row in rows if row.entry_id not in leaving] if payload_leaves else []
        queue = self._queue
        every = [*queue.script_args, *args, len(leaving), *leaving, *staying]
        return cast(bytes, await self._scripts.run(name, queue.script_keys, every)).decode()


def _row(entry_id: str, fields: dict[bytes, bytes]) -> Row:
    """Never raises: what cannot be read can still be dropped."""
    job, index = fields.get(b"g", b""), integer_or(fields.get(b"i"), 0)
    try:
        letter = decode(DeadLetter, fields.get(b"d", b""))
    except MessageError as error:
        seq_id = f"{job.decode(errors='replace')}:{index}"
        letter = DeadLetter(seq_id=seq_id, reason="unreadable_letter", detail=str(error))
    if not job:  # a dropped one
        name, _, number = letter.seq_id.rpartition(":")
        job, index = name.encode(), integer_or(number, 0)
    size, payload = integer_or(fields.get(b"n"), 0), fields.get(b"p", b"")
    return Row(entry_id=entry_id, letter=letter, job=job, index=index, n=size, payload=payload)


def _remade(envelope: Envelope, payload: bytes, new_id: bytes, sequences: int) -> list[Any]:
    """Payload, n, priority, deadline, call and mailbox of the new job; what is not a decode job goes back as it is."""
    job = envelope.job
    if job is None:
        unread = "?" if sequences == 1 else ""  # one: it may be a foreign job, and more than that once it can be read
        return [payload, sequences, 0, 0, unread if envelope.problem else envelope.function, ""]
    again = msgspec.structs.replace(job, job_id=new_id.decode(errors="replace"), n=sequences)
    fresh = arq_payload(again, int(time.time() * 1000))
    return [fresh, sequences, job.priority, int((job.deadline_s or 0) * 1000), "", job.reply_to or ""]


def _names(rows: list[Row]) -> list[str]:
    return [row.letter.seq_id for row in rows]
