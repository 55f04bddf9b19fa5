"""Dead letters: list them, replay them, drop them.

- A job's rows are consecutive in the stream (a burial), its payload in the first; see bury.lua and unbury.lua.
- A replay is a new job under a new id: the old group was completed by tombstones.
- Every read is paged. A replay or drop stops at the stream's end as of its start: a job that dies again at once isn't
  replayed again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.jobs import Discard, Replay
from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerRefused, MessageError, SluiceError
from sluice.pipeline.queue.envelope import Envelope, arq_payload, read_envelope
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.wire.codec import integer_or
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, decode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_PAGE = 100
_PASSES = 3
_REPLAYS = "replays"  # field of counts: the number of the newest replay
_REPLAY_MARK = re.compile(rb"~r\d+$")
NO_PAYLOAD = "its payload is gone; it can only be dropped"
TAKEN_ELSEWHERE = "already replayed or dropped by somebody else"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One dead (or dropped) sequence as stored in the stream."""

    entry_id: str
    letter: DeadLetter
    job: bytes  # its id, as stored on the server
    index: int
    n: int  # of its job; 0 = unknown
    payload: bytes = b""  # on the first row of a job

    @property
    def job_id(self) -> str:
        """Readable form of the id."""
        return self.job.decode(errors="replace")

    @property
    def key(self) -> tuple[bytes, int, float]:
        """Identifies the row; unchanged when it is rewritten."""
        return self.job, self.index, self.letter.at


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Selects rows; the criteria are alternatives."""

    seq_ids: frozenset[str] = frozenset()
    job: str | None = None
    reason: str | None = None
    everything: bool = False

    def takes(self, row: Row) -> bool:
        """Whether this row is selected."""
        return (
            self.everything
            or row.letter.seq_id in self.seq_ids
            or (self.job is not None and row.job_id == self.job)
            or (self.reason is not None and row.letter.reason == self.reason)
        )


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one job's selected rows; `problem` says why nothing was done."""

    job_id: str
    sequences: list[str]
    new_job_id: str | None = None
    problem: str | None = None


Act = Callable[[list[Row], list[Row]], Awaitable[Done | None]]


class DeadLetters:
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
        """Raises BrokerRefused if the key isn't a stream."""
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
        """The newest row of this sequence, and its job's payload; no search if its entry id is known."""
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
        """In the first row of its burial, which is this row or an earlier one."""
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
        """Send rows back to the queue; those of one job become one new job."""
        return await self._each(selection, self._replay)

    async def drop(self, selection: Selection) -> list[Done]:
        """Delete rows."""
        return await self._each(selection, self._drop)

    async def _each(self, selection: Selection, act: Act) -> list[Done]:
        """Act on every burial with selected rows; one that changed concurrently is looked up again."""
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
            chosen = rows  # an unreadable payload's n can't be changed: it goes back whole
        while True:
            new_id = await self._new_id(rows[0].job)
            request = _remade(envelope, payload, new_id, len(chosen), _unburied(rows, chosen))
            answer = await self._scripts.ask(self._queue.names, request)
            if answer == "gone":
                return None
            if answer == "ok":
                return Done(job_id=job_id, sequences=_names(chosen), new_job_id=new_id.decode(errors="replace"))

    async def _new_id(self, job: bytes) -> bytes:
        """Numbered across the run: no id is reused, even after its tombstone expired."""
        number = int(await self._client.hincrby(self.keys.counts, _REPLAYS, 1))
        return _REPLAY_MARK.sub(b"", job) + b"~r%d" % number

    async def _drop(self, rows: list[Row], chosen: list[Row]) -> Done | None:
        answer = await self._scripts.ask(self._queue.names, Discard(**_unburied(rows, chosen)))
        return Done(job_id=rows[0].job_id, sequences=_names(chosen)) if answer == "ok" else None


def _row(entry_id: str, fields: dict[bytes, bytes]) -> Row:
    """Never raises: an unreadable row can still be dropped."""
    job, index = fields.get(b"g", b""), integer_or(fields.get(b"i"), 0)
    try:
        letter = decode(DeadLetter, fields.get(b"d", b""))
    except MessageError as error:
        seq_id = f"{job.decode(errors='replace')}:{index}"
        letter = DeadLetter(seq_id=seq_id, reason="unreadable_letter", detail=str(error))
    if not job:  # it was dropped
        name, _, number = letter.seq_id.rpartition(":")
        job, index = name.encode(), integer_or(number, 0)
    size, payload = integer_or(fields.get(b"n"), 0), fields.get(b"p", b"")
    return Row(entry_id=entry_id, letter=letter, job=job, index=index, n=size, payload=payload)


def _unburied(rows: list[Row], chosen: list[Row]) -> dict[str, list[str]]:
    """The entries to remove, and the same job's entries that stay, if its payload is removed."""
    leaving = [row.entry_id for row in chosen]
    payload_leaves = bool(rows[0].payload) and rows[0].entry_id in leaving
    staying = [row.entry_id for row in rows if row.entry_id not in leaving] if payload_leaves else []
    return {"leaving": leaving, "staying": staying}


def _remade(envelope: Envelope, payload: bytes, new_id: bytes, sequences: int, rows: dict[str, list[str]]) -> Replay:
    """The new job; anything but a decode job goes back unchanged."""
    job = envelope.job
    if job is None:
        unread = "?" if sequences == 1 else ""  # one: it may be a foreign job, with more once it can be read
        call = unread if envelope.problem else envelope.function
        return Replay(**rows, id=new_id, payload=payload, n=sequences, priority=0, deadline_ms=0, call=call, mailbox="")
    again = msgspec.structs.replace(job, job_id=new_id.decode(errors="replace"), n=sequences)
    return Replay(
        **rows,
        id=new_id,
        payload=arq_payload(again, int(time.time() * 1000)),
        n=sequences,
        priority=job.priority,
        deadline_ms=int((job.deadline_s or 0) * 1000),
        call="",
        mailbox=job.reply_to or "",
    )


def _names(rows: list[Row]) -> list[str]:
    return [row.letter.seq_id for row in rows]


SCHEMA = 1
REASONS = (
    "expired", "failed", "images_unavailable", "invalid_request", "malformed_arguments", "malformed_envelope",
    "malformed_id", "malformed_payload", "max_tries", "payload_missing", "stale", "taken_by_foreign_worker",
    "unknown_function", "unknown_schema", "version_gone", "weights_unavailable", "worker_deaths",
)  # fmt: skip
HEX_BYTES = 64
T = TypeVar("T")


class Shown(msgspec.Struct, kw_only=True):
    """One row in a list."""

    seq_id: str
    reason: str
    detail: str
    attempts: int
    worker: str
    at: float
    age_s: float
    job_id: str
    index: int
    group_size: int
    entry_id: str


class Listing(msgspec.Struct, kw_only=True):
    """`total` rows match; `rows` are the newest of them, newest first."""

    schema_version: int = SCHEMA
    total: int
    by_reason: dict[str, int]
    rows: list[Shown]


class Letter(Shown, kw_only=True):
    """One dead letter in full."""

    schema_version: int = SCHEMA
    traceback: str
    payload_bytes: int
    job: Any = None  # the decode job, or the call
    problem: str | None = None  # why the payload can't be read
    payload_hex: str | None = None  # its first bytes, if it can't be read


def listing(config: Config, *, job: str | None, reason: str | None, limit: int, dropped: bool = False) -> Listing:
    """The matching rows; raises SluiceError for an unknown reason."""
    if limit < 1:
        raise SluiceError(f"--limit must be at least 1, got {limit}")

    async def read(letters: DeadLetters) -> Listing:
        newest, counted, others = deque[Row](maxlen=limit), Counter[str](), Counter[str]()
        async for row in letters.rows(dropped=dropped):
            fits = reason in (None, row.letter.reason) and job in (None, row.job_id)
            (counted if fits else others)[row.letter.reason] += 1
            if fits:
                newest.append(msgspec.structs.replace(row, payload=b""))
        if reason is not None and not counted[reason]:
            check_reason(reason, [*others, *([] if dropped else REASONS)])
        rows = [_shown(row, time.time()) for row in reversed(newest)]
        return Listing(total=counted.total(), by_reason=dict(counted.most_common()), rows=rows)

    return _with(config, read)


def check_reason(reason: str, known: Sequence[str]) -> None:
    """Raises SluiceError with the nearest match for an unknown reason."""
    if reason not in known:
        close = nearest(reason, list(known))
        hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(sorted(set(known))) or 'none'}"
        raise SluiceError(f"no dead letter has the reason {reason!r}; {hint}")


def letter(config: Config, seq_id: str, *, dropped: bool = False) -> Letter:
    """One row with its payload; raises SluiceError if there is none with this id."""
    return _with(config, lambda letters: read_letter(letters, seq_id, dropped=dropped))


async def read_letter(
    letters: DeadLetters, seq_id: str, *, dropped: bool = False, entry_id: str | None = None
) -> Letter:
    """The same for a caller that is already connected, and may know the entry."""
    found = await letters.find(seq_id, dropped=dropped, entry_id=entry_id)
    if found is None:
        word = "dropped sequence" if dropped else "dead letter"
        raise SluiceError(f"no {word} has the id {seq_id!r}; `sluice dlq list` shows the ids")
    row, payload = found
    shown: dict[str, Any] = msgspec.structs.asdict(_shown(row, time.time()))
    job, problem = _payload(row.job_id, payload)
    head = payload[:HEX_BYTES].hex(" ") if problem and payload else None
    return Letter(
        **shown,
        traceback=row.letter.traceback,
        payload_bytes=len(payload),
        job=job,
        problem=problem,
        payload_hex=head,
    )


def matching(config: Config, selection: Selection) -> int:
    """Number of selected rows; raises SluiceError if there are none."""

    async def read(letters: DeadLetters) -> int:
        count, reasons = 0, set[str]()
        async for row in letters.rows():
            count += selection.takes(row)
            reasons.add(row.letter.reason)
        if not count:
            raise _nothing(selection, reasons)
        return count

    return _with(config, read)


def replay(config: Config, selection: Selection) -> list[Done]:
    """Raises SluiceError if nothing is selected."""
    return _act(config, selection, DeadLetters.replay)


def drop(config: Config, selection: Selection) -> list[Done]:
    """Raises SluiceError if nothing is selected."""
    return _act(config, selection, DeadLetters.drop)


def _act(
    config: Config, selection: Selection, act: Callable[[DeadLetters, Selection], Awaitable[list[Done]]]
) -> list[Done]:
    async def run(letters: DeadLetters) -> list[Done]:
        done = await act(letters, selection)
        if not done:
            raise _nothing(selection, {row.letter.reason async for row in letters.rows()})
        return done

    return _with(config, run)


def _nothing(selection: Selection, reasons: Iterable[str]) -> SluiceError:
    present = sorted(set(reasons))
    if not present:
        return SluiceError("there are no dead letters")
    if selection.reason is not None:
        close = nearest(selection.reason, present)
        hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(present)}"
        return SluiceError(f"no dead letter has the reason {selection.reason!r}; {hint}")
    if selection.job is not None:
        return SluiceError(f"no dead letter belongs to job {selection.job!r}; `sluice dlq list` shows them")
    names = ", ".join(sorted(selection.seq_ids))
    return SluiceError(f"no dead letter has the id {names}; `sluice dlq list` shows the ids")


def _with(config: Config, use: Callable[[DeadLetters], Awaitable[T]]) -> T:
    """Raises BrokerError at once if the broker doesn't answer."""
    connection.ping(config.broker, config.run)

    async def run() -> T:
        client = connection.connect(config.broker, config.run)
        try:
            return await use(DeadLetters(client, config))
        finally:
            await client.aclose()

    return asyncio.run(run())


def _shown(row: Row, now: float) -> Shown:
    letter = row.letter
    return Shown(
        seq_id=letter.seq_id,
        reason=letter.reason,
        detail=letter.detail,
        attempts=letter.attempts,
        worker=letter.worker,
        at=letter.at,
        age_s=round(now - letter.at, 3),
        job_id=row.job_id,
        index=row.index,
        group_size=row.n,
        entry_id=row.entry_id,
    )


def _payload(job_id: str, payload: bytes) -> tuple[Any, str | None]:
    """The job as plain values, and why it can't be read."""
    if not payload:
        return None, None
    envelope = read_envelope(job_id, payload)
    if envelope.job is None and envelope.problem:
        return None, envelope.problem
    call = {"function": envelope.function, "args": list(envelope.args), "kwargs": envelope.kwargs}
    try:
        return msgspec.to_builtins(envelope.job or call, enc_hook=_plain, str_keys=True), None
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"not representable as JSON: {error}"


def _plain(value: Any) -> Any:
    if isinstance(value, TokenArray | FloatArray | Runs):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is not shown")
