"""What the commands of `sluice dlq` ask and do; text is the business of dlq_view.py."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.broker import connection
from pipeline.config import Config
from pipeline.config.suggest import nearest
from pipeline.dlq import DeadLetters, Done, Row, Selection
from pipeline.errors import SluiceError
from pipeline.jobs.envelope import read_envelope
from pipeline.wire.tokens import FloatArray, Runs, TokenArray

SCHEMA = 1
REASONS = (
    "expired", "failed", "invalid_request", "malformed_arguments", "malformed_envelope", "malformed_payload",
    "max_tries", "payload_missing", "stale", "unknown_function", "unknown_schema", "worker_deaths",
)  # fmt: skip
HEX_BYTES = 64
T = TypeVar("T")


class Shown(msgspec.Struct, kw_only=True):
    """One row of a list."""

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
    """All of one dead letter."""

    schema_version: int = SCHEMA
    traceback: str
    payload_bytes: int
    job: Any = None  # the decode job, or the call
    problem: str | None = None  # why the payload cannot be read
    payload_hex: str | None = None  # its first bytes, if it cannot be read


def listing(config: Config, *, job: str | None, reason: str | None, limit: int, dropped: bool = False) -> Listing:
    """The matching rows; raises SluiceError for a reason that is none."""
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
    """Raises SluiceError with the nearest one for a reason that nobody knows."""
    if reason not in known:
        close = nearest(reason, list(known))
        hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(sorted(set(known))) or 'none'}"
        raise SluiceError(f"no dead letter has the reason {reason!r}; {hint}")


def letter(config: Config, seq_id: str, *, dropped: bool = False) -> Letter:
    """One row with its payload; raises SluiceError when there is none of this id."""
    return _with(config, lambda letters: read_letter(letters, seq_id, dropped=dropped))


async def read_letter(
    letters: DeadLetters, seq_id: str, *, dropped: bool = False, entry_id: str | None = None
) -> Letter:
    """The same for one who is connected already, and may know where it lies."""
    found = await letters.find(seq_id, dropped=dropped, entry_id=entry_id)
    if found is None:
        word = "dropped sequence is kept" if dropped else "dead letter is there"
        raise SluiceError(f"no {word} under the id {seq_id!r}; `sluice dlq list` shows the ids")
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
    """How many rows are selected; raises SluiceError when none is."""

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
    """Raises SluiceError when nothing is selected."""
    return _act(config, selection, DeadLetters.replay)


def drop(config: Config, selection: Selection) -> list[Done]:
    """Raises SluiceError when nothing is selected."""
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
        return SluiceError(f"no dead letter is of the job {selection.job!r}; `sluice dlq list` shows what is there")
    names = ", ".join(sorted(selection.seq_ids))
    return SluiceError(f"no dead letter is there under {names}; `sluice dlq list` shows the ids")


def _with(config: Config, use: Callable[[DeadLetters], Awaitable[T]]) -> T:
    """Raises BrokerError at once when the broker does not answer."""
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
    """The job as plain values, and why it cannot be read."""
    if not payload:
        return None, None
    envelope = read_envelope(job_id, payload)
    if envelope.job is None and envelope.problem:
        return None, envelope.problem
    call = {"function": envelope.function, "args": list(envelope.args), "kwargs": envelope.kwargs}
    try:
        return msgspec.to_builtins(envelope.job or call, enc_hook=_plain, str_keys=True), None
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"no JSON can say it: {error}"


def _plain(value: Any) -> Any:
    if isinstance(value, TokenArray | FloatArray | Runs):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is not shown")
