"""Stalls of processes: roles that failed, and roles that have work and that nobody plays."""

from __future__ import annotations

from typing import cast

from pipeline.status import Snapshot
from pipeline.status_parts import Process, Stall, StallKind
from pipeline.status_words import length, waiting

_COMMANDS = {
    "producer": "produce", "gateway": "gateway", "worker": "worker", "consumer": "consume", "scorer": "score",
    "trainer": "train",
}  # fmt: skip
_GUARD = ("GuardRefused", "GuardImpossible")
_FINAL = {
    "ConfigError": "mend the configuration as the message says",
    "GuardImpossible": "mend the model or rollout_matching.repeat_terminate as the message says",
    "DataError": "mend the data as the message says, or set data.on_malformed=skip",
    "TaskError": "mend the data or the task as the message says",
    "ModelError": "mend model.path as the message says",
}


def failed(now: Snapshot) -> list[Stall]:
    """Processes that ended with an error, with their last words; not those that a newer process replaced."""
    rows = [row for row in now.processes if row.ended_at is not None]
    return [_failed(now, row) for row in rows if not any(_replaces(other, row) for other in now.processes)]


def nobody(now: Snapshot) -> list[Stall]:
    """Roles with work and without a live process."""
    results = sum(lag.entries for lag in now.lag if lag.stream.startswith("results"))
    scores = sum(lag.entries for lag in now.lag if lag.stream.startswith("score"))
    batches = waiting(now.waiting_batches, "batch", "batches")
    if not batches and now.credit.sequences and _dead_rows(now, "trainer"):
        batches = f"{waiting(now.credit.sequences, 'sequence')} to be trained"
    work = {
        "producer": "there are rows to read" if _rows_are_left(now) else "",
        "worker": waiting(now.queued_jobs, "job"),
        "gateway": waiting(now.open_rollouts, "rollout"),
        "consumer": waiting(results, "result"),
        "scorer": waiting(scores, "score job"),
        "trainer": batches,
    }
    return [_nobody(now, role, what) for role, what in work.items() if what and not is_played(now, role)]


def is_played(now: Snapshot, role: str) -> bool:
    """Whether one process of the role is alive, by the broker's clock."""
    return any(row.role == role and row.is_alive for row in now.processes)


def _rows_are_left(now: Snapshot) -> bool:
    """A run that gateways alone feed has no rows."""
    return not now.exhausted and (now.total is not None or not is_played(now, "gateway"))


def _nobody(now: Snapshot, role: str, what: str) -> Stall:
    dead = _dead_rows(now, role)
    kind = "trainer_dead" if dead and role == "trainer" else f"no_{role}"
    says, since = f"no {role} is alive, and {what}", _waits_since(now, role)
    if dead:
        last = dead[-1]
        since = last.ended_at or last.at
        how = "failed" if last.ended_at else "fell silent"
        says += f"; {last.name} {how} {length(now.at - since)} ago"
    command = f"`sluice {_COMMANDS[role]} -c CONFIG`"
    remedy = (
        f"start one with {command}; under `sluice run` and `sluice up` that happens by itself, see the {role}'s log"
    )
    return Stall(kind=cast(StallKind, kind), says=says, since=since, remedy=remedy)


def _waits_since(now: Snapshot, role: str) -> float | None:
    """Of the oldest thing that waits for the role."""
    streams = {"consumer": "results", "scorer": "score", "trainer": "batches"}
    ages = [now.depth.oldest_s] if role == "worker" and now.depth else []
    if role in streams:
        ages = [lag.oldest_s for lag in now.lag if lag.stream.startswith(streams[role])]
    oldest = max((age for age in ages if age is not None), default=None)
    return None if oldest is None else now.at - oldest


def _dead_rows(now: Snapshot, role: str) -> list[Process]:
    """The newest last."""
    rows = [row for row in now.processes if row.role == role and not row.is_alive]
    return sorted(rows, key=lambda row: row.at)


def _replaces(row: Process, ended: Process) -> bool:
    return row.is_alive and row.role == ended.role and row.started > (ended.ended_at or 0)


def _failed(now: Snapshot, row: Process) -> Stall:
    refused = row.error_kind in _GUARD
    how = "refused to start, as its repeat guard cannot be proved to work" if refused else "failed"
    again = "it is started again by itself under `sluice run` and `sluice up`; if it fails again, read its log"
    remedy = f"{_FINAL[row.error_kind]}, then start it again" if row.error_kind in _FINAL else again
    if row.error_kind == "GuardRefused":
        remedy = (
            "install the engine that this release names, or, to go on without a guard, set "
            "rollout_matching.repeat_terminate.enabled=false; then start the worker again"
        )
    return Stall(
        kind="guard_refused" if refused else "process_failed",
        says=f"{row.name} {how}: {row.error}",
        since=row.ended_at,
        remedy=remedy,
        blocks=not (row.is_onlooker or is_played(now, row.role) or (row.role == "producer" and now.exhausted)),
    )
