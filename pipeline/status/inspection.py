"""Detailed state of a run: queue, leases, streams, what waits for what, and whether it moves. For `sluice status`.

- It writes nothing, so a read-only Redis user is enough.
- Its cost doesn't grow with the queue: members are counted by score, and at most `MOST_JOBS` of them are read.

Whether a run moves is judged from two snapshots (`verdict`; `sluice status --why`):

- It is stuck if a stall blocks it that doesn't end by itself, or if nothing moved, there is a stall and no process is
  working.
- A run that was asked to stop, or that reached trainer.max_versions, isn't stuck; one whose supervisor was killed needs
  a new start.
- A working process (a step, a long sequence) counts as movement to come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.connection import BrokerSilent
from sluice.pipeline.broker.scripts.library import FAR_MS
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError, MessageError
from sluice.pipeline.status.run_end import RunEnd, read_end, run_directory
from sluice.pipeline.status.snapshot import (
    MOST_JOBS,
    BrokerUse,
    Depth,
    Holder,
    Lag,
    Lease,
    Process,
    Reading,
    Snapshot,
    snapshot,
)
from sluice.pipeline.status.stalls import stalls
from sluice.pipeline.wire.codec import integer_or, shown
from sluice.pipeline.wire.keys import BATCH_GROUP, RESULT_GROUP, SCORE_GROUP, Keys
from sluice.pipeline.wire.messages import WeightVersion, decode

_SHOWN = 20
_FIELDS = ("owner", "worker", "attempt", "at", "n", "ndone", "shared", "deaths", "alone", "since")


async def inspect(client: Redis, keys: Keys, partitions: int, directory: Path | None = None) -> Snapshot:
    """A snapshot with all its parts; `directory` is the run's, which tells how it ended."""
    now = await snapshot(client, keys)
    read = Reading(now.unreadable)
    leases = await _look_at_queue(client, keys, now, read)
    now.leases = sorted(leases, key=lambda lease: -(lease.held_s or lease.age_s))[:_SHOWN]
    now.attempts = {str(key): count for key, count in sorted(Counter(lease.attempt for lease in leases).items())}
    now.holders = _holders(leases)
    now.deaths = sum(lease.deaths for lease in leases)
    now.lag = await _look_at_streams(client, keys, partitions, now.at, read)
    now.broker, now.latest_at = await _look_at_broker(client, keys, now.latest_version, read)
    now.end = _current(now, await asyncio.to_thread(read_end, directory)) if directory else None
    now.stalls = stalls(now)
    return now


def _current(now: Snapshot, end: RunEnd | None) -> RunEnd | None:
    """None once a role of the run has been alive since."""
    rows = [row for row in now.processes if row.is_alive and not row.is_onlooker]
    if end is not None and end.state != "killed":  # a killed one's time is that of the files, which live roles write
        rows = [row for row in rows if row.at > end.at]
    return None if rows else end


async def _look_at_queue(client: Redis, keys: Keys, now: Snapshot, read: Reading) -> list[Lease]:
    """Sets the depth; returns the leases of the first `MOST_JOBS` jobs that aren't ready."""
    now_ms = now.at * 1000
    later, before = f"({now_ms}", f"({FAR_MS}"
    pipe: Any = client.pipeline(transaction=False)
    pipe.zcount(keys.jobs, "-inf", now_ms)
    pipe.zcount(keys.jobs, later, before)
    pipe.zcard(keys.leases)
    pipe.zcard(keys.alone)
    pipe.zrangebyscore(keys.jobs, later, before, start=0, num=MOST_JOBS, withscores=True)
    pipe.zrangebyscore(keys.jobs, "-inf", now_ms, start=0, num=1, withscores=True)
    names = [keys.jobs, keys.jobs, keys.leases, keys.alone, keys.jobs, keys.jobs]
    answers = map(read.answer, names, cast("list[Any]", await pipe.execute(raise_on_error=False)))
    *counts, members, first = answers
    members, first = cast("list[Any]", members or []), cast("list[Any]", first or [])
    ready, waiting, running, alone = (int(count or 0) for count in counts)
    pipe = client.pipeline(transaction=False)
    for job_id, _ in [*members, *first]:
        pipe.hmget(keys.job_state.encode() + job_id, *_FIELDS)
    found = cast("list[Any]", await pipe.execute(raise_on_error=False)) if members or first else []
    nothing: list[bytes | None] = [None] * len(_FIELDS)
    states = [
        cast("list[bytes | None]", read.answer(keys.job_state + shown(job_id), state) or nothing)
        for (job_id, _), state in zip([*members, *first], found, strict=True)
    ]
    since = states.pop()[3] if first else None
    leases = [
        _lease(job_id, float(score), state, now_ms)
        for (job_id, score), state in zip(members, states, strict=True)
        if state[0] is not None
    ]
    now.depth = Depth(
        ready=int(ready),
        running=int(running),
        deferred=max(0, int(waiting) - int(running)),
        alone=int(alone),
        oldest_s=_since(since, now_ms),
        seen_all=int(waiting) <= MOST_JOBS,
    )
    return leases


def _lease(job_id: bytes, score: float, state: list[bytes | None], now_ms: float) -> Lease:
    _, worker, attempt, at, n, ndone, shared, deaths, alone, since = state
    return Lease(
        job_id=job_id.decode(errors="replace"),
        worker=(worker or b"").decode(errors="replace"),
        attempt=integer_or(attempt, 0),
        age_s=_since(at, now_ms) or 0.0,
        held_s=_since(since, now_ms),
        left_s=round((score - now_ms) / 1000, 3),
        sequences=integer_or(n, 1),
        committed=integer_or(ndone, 0),
        deaths=integer_or(shared, 0) + integer_or(deaths, 0),
        alone=alone is not None,
    )


def _holders(leases: list[Lease]) -> list[Holder]:
    found: dict[str, Holder] = {}
    for lease in leases:
        held = found.setdefault(lease.worker, Holder(worker=lease.worker))
        held.jobs += 1
        held.retried += lease.attempt > 1
        held.sequences += lease.sequences
        held.committed += lease.committed
        held.oldest_s = max(held.oldest_s, lease.held_s or 0.0)
    return sorted(found.values(), key=lambda held: held.worker)


def _since(at_ms: bytes | None, now_ms: float) -> float | None:
    """Seconds; None if unknown."""
    at = integer_or(at_ms, None)
    return None if at is None else round((now_ms - at) / 1000, 3)


async def _look_at_streams(client: Redis, keys: Keys, partitions: int, now_s: float, read: Reading) -> list[Lag]:
    streams = [(f"{keys.results}{number}", RESULT_GROUP) for number in range(partitions)]
    streams += [(keys.batches, BATCH_GROUP), (keys.score_jobs, SCORE_GROUP)]
    pipe: Any = client.pipeline(transaction=False)
    for stream, group in streams:
        pipe.xlen(stream)
        pipe.xrange(stream, count=1)
        pipe.xpending(stream, group)
    answers = cast("list[Any]", await pipe.execute(raise_on_error=False))
    found: list[Lag] = []
    newest_taken: list[bytes] = []
    for i, (stream, _) in enumerate(streams):
        length, first, pending = answers[3 * i : 3 * i + 3]
        length, first = read.answer(stream, length), read.answer(stream, first)
        if length is None:
            continue
        if stream == keys.score_jobs and not length:  # only with a policy loss
            continue
        if isinstance(pending, ResponseError):  # nobody has read from it yet
            pending = dict[str, Any](pending=0)
        if isinstance(pending, Exception):
            raise pending
        name = stream.removeprefix(keys.prefix)
        found.append(Lag(stream=name, entries=int(length), taken=int(pending["pending"]), oldest_s=_age(first, now_s)))
        newest_taken.append(cast("bytes | None", pending.get("max")) or b"-")
    await _look_at_unread(pipe, keys, found, newest_taken, now_s)
    return found


async def _look_at_unread(pipe: Any, keys: Keys, found: list[Lag], taken: list[bytes], now_s: float) -> None:
    """Sets the age of the first entry after the newest that was read: owners read in order."""
    for lag, last in zip(found, taken, strict=True):
        pipe.xrange(keys.prefix + lag.stream, min=last if last == b"-" else b"(" + last, count=1)
    for lag, first in zip(found, cast("list[Any]", await pipe.execute()), strict=True):
        lag.unread_s = _age(first, now_s) if lag.entries > lag.taken else None


def _age(entries: Any, now_s: float) -> float | None:
    """Age of the first one, from its id."""
    return round(now_s - int(entries[0][0].partition(b"-")[0]) / 1000, 3) if entries else None


async def _look_at_broker(
    client: Redis, keys: Keys, version: int | None, read: Reading
) -> tuple[BrokerUse, float | None]:
    """The broker's own numbers, and when the newest version was published."""
    pipe: Any = client.pipeline(transaction=False)
    for section in ("server", "memory", "persistence", "errorstats", "replication"):  # several at once need Redis 7
        pipe.info(section)
    pipe.hget(keys.versions, str(version))
    *facts, manifest = cast("list[Any]", await pipe.execute(raise_on_error=False))
    for fact in facts:
        if isinstance(fact, Exception):
            raise fact
    manifest = cast("bytes | None", read.answer(keys.versions, manifest))
    server, memory, persistence, errors, replication = cast("list[dict[str, Any]]", facts)
    use = BrokerUse(
        used_bytes=int(memory.get("used_memory", 0)),
        max_bytes=int(memory.get("maxmemory", 0)) or None,
        policy=str(memory.get("maxmemory_policy", "noeviction")),
        aof=bool(int(persistence.get("aof_enabled", 0))),
        version=str(server.get("redis_version", "")),
        refused=int(errors.get("errorstat_OOM", {}).get("count", 0)),
        read_only=_read_only(persistence, errors, replication),
    )
    try:
        published = decode(WeightVersion, manifest).published_at if manifest else 0.0
    except MessageError as error:
        read.skip(keys.versions, str(version), error)
        published = 0.0
    return use, published or None


def _read_only(
    persistence: dict[str, Any], errors: dict[str, Any], replication: dict[str, Any]
) -> Literal["", "disk", "replica", "alone"]:
    """Why the server refuses every write, as far as INFO tells: CONFIG may be forbidden."""
    if replication.get("role") == "slave":
        return "replica"
    # A failed snapshot stops writes only where stop-writes-on-bgsave-error is set: then there are refusals.
    failed = persistence.get("rdb_last_bgsave_status") == "err" and "errorstat_MISCONF" in errors
    if persistence.get("aof_last_write_status") == "err" or failed:
        return "disk"
    return "alone" if replication.get("min_slaves_good_slaves") == 0 else ""


APART_S = 1.0  # between the two snapshots
_ANSWER_S = 3.0  # a reachable broker answers sooner
_DEADLINE_S = 15.0
_COUNTS = ("tokens", "enqueued", "committed", "accepted", "trained", "stepped", "dead", "dropped")


VerdictState = Literal["complete", "idle", "moving", "working", "waiting", "stopped", "killed", "stalled", "failed"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The headline of `sluice status --why`."""

    state: VerdictState
    moved: dict[str, int] = {}  # counts that changed between the two snapshots
    over_s: float = 0.0
    busy: str | None = None  # a working process

    @property
    def is_healthy(self) -> bool:
        """Whether nothing needs to be done."""
        return self.state not in ("stalled", "failed", "killed")


def verdict(before: Snapshot, now: Snapshot) -> Verdict:
    """`now` is an inspection, with its stalls."""
    over_s = max(0.0, now.at - before.at)
    moved = {name: count for name in _COUNTS if (count := int(getattr(now, name) - getattr(before, name))) > 0}
    if now.latest_version != before.latest_version:
        moved["versions"] = max(1, (now.latest_version or 0) - (before.latest_version or 0))
    busy = next((row.name for row in now.processes if _works(row)), None)
    return Verdict(state=_state(now, moved, busy), moved=moved, over_s=round(over_s, 3), busy=busy)


def _state(now: Snapshot, moved: dict[str, int], busy: str | None) -> VerdictState:
    if now.complete:
        return "complete"
    if not (now.enqueued or now.processes):
        return "idle"
    if now.end is not None and now.end.state in ("failed", "killed"):
        return now.end.state
    if now.is_stopped:
        return "stopped"
    if any(stall.blocks for stall in now.stalls) or (now.stalls and not moved and not busy):
        return "stalled"
    return "moving" if moved else "working" if busy else "waiting"


def _works(row: Process) -> bool:
    return row.is_alive and row.wait is None and not row.is_onlooker


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The result of both snapshots."""

    now: Snapshot
    verdict: Verdict


def look_twice(config: Config, apart_s: float = APART_S) -> Why:
    """Raises BrokerError within seconds, with the remedy, if the broker doesn't answer."""
    settings = msgspec.structs.replace(
        config.broker, retry_for_s=_ANSWER_S, socket_timeout_s=_ANSWER_S, connect_timeout_s=_ANSWER_S
    )
    hasty = msgspec.structs.replace(config, broker=settings)
    try:
        connection.ping(hasty.broker, config.run)
    except BrokerSilent as error:
        patience = f"{config.broker.retry_for_s:g} s"
        raise BrokerError(
            f"{error}. Every process of the run waits up to {patience} (broker.retry_for_s), and continues once it is "
            "back"
        ) from error
    return asyncio.run(_look_twice(hasty, apart_s))


async def _look_twice(config: Config, apart_s: float) -> Why:
    client, keys = connection.connect(config.broker, config.run), Keys(config.run)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            before = await snapshot(client, keys)
            await asyncio.sleep(0 if before.complete else apart_s)
            now = await inspect(client, keys, config.consumer.count, run_directory(config))
            return Why(now=now, verdict=verdict(before, now))
    except TimeoutError as error:
        raise BrokerError(
            f"the broker is too slow: it did not answer a status query within {_DEADLINE_S:g} s; is its machine "
            "overloaded or swapping?"
        ) from error
    finally:
        await client.aclose()
