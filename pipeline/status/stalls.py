"""Why a run is stuck: what waits for what, and since when. Pure, from one inspection; produces no text.

    run that failed ─▶ broker ─▶ roles that failed ─▶ missing roles ─▶ old weights ─▶ lag ─▶ credit ─▶ runs alone

- Causes come before their effects. A run that is complete, was stopped or never began has no stalls.
- A broker that takes no writes takes no heartbeats either: then silence is nobody's death.
- `blocks` is false for a wait that ends by itself.
"""

from __future__ import annotations

from typing import Literal, cast

from sluice.pipeline.roles import PARTICIPANTS, ROLES, RoleName, Source
from sluice.pipeline.status.snapshot import Lag, Process, Snapshot, Stall, StallKind
from sluice.pipeline.wire.waits import WaitKind

__all__ = ["Stall", "StallKind", "dead_rows", "is_played", "late_results", "refuses_newest", "stalls", "work_for"]

OLD_S = 10.0  # a version published this long ago should be in use
LAG_S = 10.0  # a result unread for this long is late
_BLOCKS_S = 60.0
_GUARD = ("GuardRefused", "GuardImpossible")


def stalls(now: Snapshot) -> list[Stall]:
    """What blocks the run, from an inspection (`inspection.inspect`)."""
    if now.complete or not (now.enqueued or now.processes or now.unreadable):
        return []
    if now.end is not None and now.end.state == "failed":
        return [Stall(kind="run_failed", process=now.end.process or None, since=now.end.at), *_unreadable(now)]
    if now.is_stopped:
        return _unreadable(now)
    if now.broker is not None and now.broker.read_only:
        return [Stall(kind="broker_read_only", since=_newest_beat(now)), *_unreadable(now)]
    found = [*_broker_full(now), *_unreadable(now), *_failed(now)]
    if not any(row.is_alive and not row.is_onlooker for row in now.processes):
        return [*found, _no_process(now)]
    found += [*_nobody(now), *_old_versions(now), *_consumer_lag(now)]
    return [*found, *_credit_exhausted(now), *_runs_alone(now)]


def is_played(now: Snapshot, role: str) -> bool:
    """Whether a process of the role is alive, by the broker's clock."""
    return any(row.role == role and row.is_alive for row in now.processes)


def dead_rows(now: Snapshot, role: str) -> list[Process]:
    """Processes of a role that failed or fell silent; newest last."""
    return sorted((row for row in now.processes if row.role == role and not row.is_alive), key=lambda row: row.at)


def work_for(now: Snapshot, role: RoleName) -> tuple[Source | Literal["sequences"], int]:
    """The work waiting for a role, and how much; for rows only whether there are any."""
    source = ROLES[role].waits_for
    match source:
        case "rows":  # a run fed only by gateways has none
            left = not now.exhausted and (now.total is not None or not is_played(now, "gateway"))
            return source, int(left)
        case "jobs":
            return source, now.queued_jobs
        case "rollouts":
            return source, now.open_rollouts
        case "batches":
            if not now.waiting_batches and now.credit.sequences and dead_rows(now, role):
                return "sequences", now.credit.sequences  # they would be missing it
            return source, now.waiting_batches
        case "results" | "score_jobs":
            return source, sum(lag.entries for lag in _lags(now, role))
        case "versions":
            return source, int(now.evaluation.running is not None)
        case "requests":
            return source, 0


def late_results(now: Snapshot) -> list[Lag]:
    """Partitions with a result that has been unread for too long."""
    return [lag for lag in _lags(now, "consumer") if (lag.unread_s or 0) > LAG_S]


def refuses_newest(now: Snapshot, row: Process) -> bool:
    """Whether a worker has refused the newest weights."""
    return now.latest_version is not None and row.facts.get("refused_version") == now.latest_version


def _lags(now: Snapshot, role: RoleName) -> list[Lag]:
    return [lag for lag in now.lag if lag.stream.startswith(ROLES[role].stream)]


def _broker_full(now: Snapshot) -> list[Stall]:
    """It refuses writes: every process waits for free memory in it."""
    if now.broker is None or not now.broker.is_full:
        return []
    return [Stall(kind="broker_full", since=_since(_waiting_for(now, WaitKind.BROKER_MEMORY)))]


def _newest_beat(now: Snapshot) -> float | None:
    """Since when nobody's heartbeat has been taken."""
    return max((row.at for row in now.processes), default=None)


def _unreadable(now: Snapshot) -> list[Stall]:
    """Entries of the run that this release can't read."""
    return [Stall(kind="unreadable", blocks=False)] if now.unreadable else []


def _failed(now: Snapshot) -> list[Stall]:
    """Processes that ended with an error; not those that a newer process replaced."""
    rows = [row for row in now.processes if row.ended_at is not None]
    return [_failure(now, row) for row in rows if not any(_replaces(other, row) for other in now.processes)]


def _failure(now: Snapshot, row: Process) -> Stall:
    is_needed = not (row.is_onlooker or is_played(now, row.role) or (row.role == "producer" and now.exhausted))
    kind: StallKind = "guard_refused" if row.error_kind in _GUARD else "process_failed"
    return Stall(kind=kind, role=row.role, process=row.name, since=row.ended_at, blocks=is_needed)


def _replaces(row: Process, ended: Process) -> bool:
    return row.is_alive and row.role == ended.role and row.started > (ended.ended_at or 0)


def _no_process(now: Snapshot) -> Stall:
    ended = (row.ended_at or row.at for row in now.processes if not row.is_onlooker)
    return Stall(kind="no_process", since=max(ended, default=None))


def _nobody(now: Snapshot) -> list[Stall]:
    """Roles with work but no live process."""
    return [_missing(now, role) for role in PARTICIPANTS if work_for(now, role)[1] and not is_played(now, role)]


def _missing(now: Snapshot, role: RoleName) -> Stall:
    kind, dead = cast(StallKind, f"no_{role}"), dead_rows(now, role)
    if not dead:
        return Stall(kind=kind, role=role, since=_oldest_work(now, role))
    last = dead[-1]
    if role == "trainer":
        kind = "trainer_dead"
    return Stall(kind=kind, role=role, process=last.name, since=last.ended_at or last.at)


def _oldest_work(now: Snapshot, role: RoleName) -> float | None:
    """Since when the oldest item has waited for the role."""
    ages = [now.depth.oldest_s] if ROLES[role].waits_for == "jobs" and now.depth else []
    if ROLES[role].stream:
        ages = [lag.oldest_s for lag in _lags(now, role)]
    oldest = max((age for age in ages if age is not None), default=None)
    return None if oldest is None else now.at - oldest


def _old_versions(now: Snapshot) -> list[Stall]:
    """Every live worker decodes with weights older than the newest, published a while ago."""
    latest, since = now.latest_version, now.latest_at
    workers = [row for row in now.processes if row.role == "worker" and row.is_alive and row.version is not None]
    held = [row.version for row in workers if row.version is not None]
    if latest is None or since is None or not held or latest in held or now.at - since < OLD_S:
        return []
    refused = next((row.name for row in workers if refuses_newest(now, row)), None)
    waits = next((row.name for row in workers if row.wait is not None), None)
    blocks = refused is not None or now.at - since > _BLOCKS_S
    return [Stall(kind="old_versions", role="worker", process=refused or waits, since=since, blocks=blocks)]


def _consumer_lag(now: Snapshot) -> list[Stall]:
    """Unread results while a consumer is alive; without one it is no_consumer."""
    late = late_results(now)
    if not late or not is_played(now, "consumer"):
        return []
    since, dead = now.at - max(lag.unread_s or 0 for lag in late), dead_rows(now, "consumer")
    return [Stall(kind="consumer_lag", role="consumer", process=dead[-1].name if dead else None, since=since)]


def _credit_exhausted(now: Snapshot) -> list[Stall]:
    """The producer waits until sequences end."""
    waits = [row for row in _waiting_for(now, WaitKind.CREDIT) if row.role == "producer"]
    if now.exhausted or not (now.credit.is_used_up or waits):
        return []
    name, since = (waits[0].name, _since(waits)) if waits else (None, None)
    blocks = not is_played(now, "trainer")
    return [Stall(kind="credit_exhausted", role="producer", process=name, since=since, blocks=blocks)]


def _runs_alone(now: Snapshot) -> list[Stall]:
    """Suspects: jobs that killed workers."""
    return [Stall(kind="runs_alone", blocks=False)] if now.depth and now.depth.alone else []


def _waiting_for(now: Snapshot, kind: WaitKind) -> list[Process]:
    return [row for row in now.processes if row.is_alive and row.wait is not None and row.wait.kind == kind]


def _since(waiting: list[Process]) -> float | None:
    """Since when the first of them has waited."""
    return min((row.wait.since for row in waiting if row.wait and row.wait.since is not None), default=None)
