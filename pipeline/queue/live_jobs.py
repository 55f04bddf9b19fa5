"""The jobs in the queue now: a list, totals, and one with its log.

- Its cost doesn't grow with the queue: it shows at most `limit` jobs, and searches at most `_MOST`.
- ready: can be claimed now; running: a worker holds it; deferred: not yet due; alone: waits to run by itself.
- A job's log has one line per event: ms, a letter, attempt, worker, detail, separated by tabs. Times are the broker's.
  While the job lives, `log` in its state has the failed attempts; at the end the whole log goes out as field `l` of the
  entry that ended it. It keeps its newest lines (log.lua); unreadable lines are skipped.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from redis.asyncio import Redis

from sluice.pipeline.broker.scripts.library import FAR_MS
from sluice.pipeline.queue.envelope import read_envelope
from sluice.pipeline.wire.codec import LAST_S, integer_or
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DecodeJob

JobState = Literal["ready", "running", "deferred", "alone"]
JOB_STATES: tuple[JobState, ...] = ("running", "ready", "deferred", "alone")
_MOST = 5000
_FIELDS = ("owner", "worker", "attempt", "at", "n", "ndone", "since", "log")


class LiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job that hasn't ended."""

    job_id: str
    state: JobState
    attempt: int = 0
    worker: str = ""  # holds it, or held it last
    sequences: int = 1
    committed: int = 0  # sequences committed
    enqueued_at: float | None = None  # Unix time; None for a foreign job that no worker has read yet
    since: float | None = None  # running: start time
    ready_at: float | None = None  # deferred: due time


class LiveJobs(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: running ones first, then in the order they'll be claimed."""

    rows: list[LiveRow]
    total: dict[JobState, int]  # all jobs, whatever the search
    seen_all: bool = True  # False: there may be more matches


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job with its log."""

    row: LiveRow
    events: list[JobEvent]
    job: DecodeJob | None = None
    function: str = ""  # name of a plain call's function
    problem: str = ""  # why the payload can't be read


async def live_jobs(client: Redis, keys: Keys, *, search: str = "", state: str = "", limit: int = 200) -> LiveJobs:
    """Jobs in the queue; `search` is a substring of the id, `state` one of JOB_STATES or "" for all."""
    now_ms = await _now_ms(client)
    pipe: Any = client.pipeline(transaction=False)
    pipe.zcount(keys.jobs, "-inf", now_ms)
    pipe.zcount(keys.jobs, f"({now_ms}", f"({FAR_MS}")
    pipe.zcard(keys.leases)
    pipe.zcard(keys.alone)
    ready, waiting, running, alone = cast("list[int]", await pipe.execute())
    deferred = max(0, waiting - running)
    total: dict[JobState, int] = {"running": running, "ready": ready, "deferred": deferred, "alone": alone}
    found, most = list[bytes](), _MOST if search else limit
    for each in JOB_STATES:
        if state in ("", each) and total[each]:
            ids = await _ids(client, keys, each, now_ms, most)
            found += [job_id for job_id in ids if search.encode() in job_id]
    looked = sum(count for name, count in total.items() if state in ("", name))
    rows = await _rows(client, keys, found[:limit], now_ms)
    return LiveJobs(rows=rows, total=total, seen_all=len(found) <= limit and looked <= most)


async def live_job(client: Redis, keys: Keys, job_id: str) -> LiveJob | None:
    """One job; None if it has ended, or never existed."""
    now_ms = await _now_ms(client)
    pipe: Any = client.pipeline(transaction=False)
    pipe.zscore(keys.jobs, job_id)
    pipe.hmget(keys.job_state + job_id, *_FIELDS)
    pipe.get(ARQ_JOB + job_id)
    score, state, payload = cast("tuple[Any, Any, Any]", await pipe.execute(raise_on_error=False))
    if not isinstance(score, float):
        return None
    fields = _fields(state)
    row = _row(job_id.encode(), score, fields, now_ms)
    events = _events(row, fields[-1] or b"")
    if not isinstance(payload, bytes):
        return LiveJob(row=row, events=events, problem="its payload is gone")
    envelope = read_envelope(job_id, payload)
    return LiveJob(row=row, events=events, job=envelope.job, function=envelope.function, problem=envelope.problem)


def _events(row: LiveRow, log: bytes) -> list[JobEvent]:
    events = parse_log(log)
    if row.enqueued_at is not None:
        events.insert(0, JobEvent(at=row.enqueued_at, kind="enqueued"))
    if row.since is not None:
        events.append(JobEvent(at=row.since, kind="claimed", attempt=row.attempt, worker=row.worker))
    return events


async def _now_ms(client: Redis) -> float:
    seconds, micros = cast("tuple[int, int]", await cast(Any, client).time())
    return seconds * 1000 + micros / 1000


async def _ids(client: Redis, keys: Keys, state: JobState, now_ms: float, most: int) -> list[bytes]:
    """The first `most` jobs in that state."""
    asked: Any = client
    if state == "ready":
        return await asked.zrangebyscore(keys.jobs, "-inf", now_ms, start=0, num=most)
    if state != "deferred":
        return await asked.zrange(keys.leases if state == "running" else keys.alone, 0, most - 1)
    later: list[bytes] = await asked.zrangebyscore(keys.jobs, f"({now_ms}", f"({FAR_MS}", start=0, num=_MOST)
    leased: list[Any] = await asked.zmscore(keys.leases, later) if later else []
    return [job_id for job_id, ends in zip(later, leased, strict=True) if ends is None][:most]


async def _rows(client: Redis, keys: Keys, ids: list[bytes], now_ms: float) -> list[LiveRow]:
    """Skips those that have ended meanwhile."""
    pipe: Any = client.pipeline(transaction=False)
    for job_id in ids:
        pipe.zscore(keys.jobs, job_id)
        pipe.hmget(keys.job_state.encode() + job_id, *_FIELDS)
    found = cast("list[Any]", await pipe.execute(raise_on_error=False)) if ids else []
    states = zip(ids, found[::2], found[1::2], strict=True)
    return [_row(job_id, score, _fields(state), now_ms) for job_id, score, state in states if isinstance(score, float)]


def _fields(state: Any) -> list[bytes | None]:
    """None for each if the key has another type."""
    return [None] * len(_FIELDS) if isinstance(state, Exception) else state


def _seconds(ms: bytes | None) -> float | None:
    at = integer_or(ms, None, most=int(LAST_S * 1000))
    return None if at is None else at / 1000


def _row(job_id: bytes, score: float, fields: list[bytes | None], now_ms: float) -> LiveRow:
    owner, worker, attempt, at, n, ndone, since, _ = fields
    state: JobState = "alone" if score >= FAR_MS else "deferred" if score > now_ms else "ready"
    return LiveRow(
        job_id=job_id.decode(errors="replace"),
        state="running" if owner else state,
        attempt=integer_or(attempt, 0),
        worker=(worker or b"").decode(errors="replace"),
        sequences=integer_or(n, 1),
        committed=integer_or(ndone, 0),
        enqueued_at=_seconds(at),
        since=_seconds(since) if owner else None,
        ready_at=score / 1000 if state == "deferred" and not owner else None,
    )


EventKind = Literal["enqueued", "claimed", "handed_back", "lost", "ended"]
_KINDS: dict[str, EventKind] = {"e": "enqueued", "c": "claimed", "h": "handed_back", "l": "lost", "x": "ended"}


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a job's log."""

    at: float  # Unix time
    kind: EventKind
    attempt: int = 0  # 0 before the first claim
    worker: str = ""
    detail: str = ""


def parse_log(raw: bytes) -> list[JobEvent]:
    """The events, oldest first."""
    found: list[JobEvent] = []
    for line in raw.decode(errors="replace").split("\n"):
        parts = line.split("\t")
        if len(parts) != 5 or parts[1] not in _KINDS:
            continue  # the text after the last line feed too
        if (at_ms := integer_or(parts[0], None, most=int(LAST_S * 1000))) is not None:
            at, kind, attempt = at_ms / 1000, _KINDS[parts[1]], integer_or(parts[2], 0)
            found.append(JobEvent(at=at, kind=kind, attempt=attempt, worker=parts[3], detail=parts[4]))
    return found
