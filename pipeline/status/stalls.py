"""Why a run stands still: what waits for what, since when, and what to do. Pure, of one inspection.

    broker ─▶ roles that failed ─▶ roles that nobody plays ─▶ old weights ─▶ lag ─▶ credit ─▶ jobs that run alone

- Causes come before what follows from them. A complete run has none, nor one that never began.
- `blocks` is false for a wait that ends by itself.
"""

from __future__ import annotations

from typing import cast

from sluice.pipeline.broker.retry import FULL, FULL_REMEDY
from sluice.pipeline.status.snapshot import CreditUse, Process, Snapshot, Stall, StallKind
from sluice.pipeline.status.text import counted, credit, length, waiting

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


OLD_S = 10.0  # a version that was published this long ago should be in use
LAG_S = 10.0  # a result that is unread for this long is late
_BLOCKS_S = 60.0
_MIB = 1 << 20
_SHOWN_ENTRIES = 3


def broker_full(now: Snapshot) -> list[Stall]:
    """It refuses writes: every process waits for room in it."""
    use = now.broker
    if use is None or not use.is_full:
        return []
    limit = (use.max_bytes or 0) / _MIB
    refused = f"; it has refused {counted(use.refused, 'write')} so far" if use.refused else ""
    return [
        Stall(
            kind="broker_full",
            says=f"the broker is full ({use.used_bytes / _MIB:,.1f} of {limit:,.1f} MiB): who writes waits{refused}",
            since=_first([row for row in now.processes if _waits_for_room(row)]),
            remedy=FULL_REMEDY,
        )
    ]


def _first(waiting: list[Process]) -> float | None:
    """Since when the first of them waits."""
    return min((row.waiting_since for row in waiting if row.waiting_since is not None), default=None)


def _waits_for_room(row: Process) -> bool:
    return row.is_alive and row.waiting_for == FULL


def old_versions(now: Snapshot) -> list[Stall]:
    """Every live worker decodes with older weights than the newest, which has been there for a while."""
    latest, since = now.latest_version, now.latest_at
    workers = [row for row in now.processes if row.role == "worker" and row.is_alive and row.version is not None]
    held = [row.version for row in workers if row.version is not None]
    if latest is None or since is None or not held or max(held) >= latest or now.at - since < OLD_S:
        return []
    refused = [row.name for row in workers if row.facts.get("refused_version") == latest]
    waits = [f"{row.name} waits for {row.waiting_for}" for row in workers if row.waiting_for]
    if refused:
        why, remedy = f"{refused[0]} refused it", f"the log of {refused[0]} says why; the next version may be taken"
    else:
        why = waits[0] if waits else "the workers are busy with what they have"
        remedy = "look at the disk that holds the weights; a worker gives up after weights.load_timeout_s"
    who = "the one live worker decodes" if len(workers) == 1 else f"all {len(workers)} live workers decode"
    says = f"{who} with weights v{max(held)} or older, and v{latest} has been there for {length(now.at - since)}: {why}"
    blocks = bool(refused) or now.at - since > _BLOCKS_S
    return [Stall(kind="old_versions", says=says, since=since, remedy=remedy, blocks=blocks)]


def consumer_lag(now: Snapshot) -> list[Stall]:
    """Results that nobody reads while a consumer is alive; without one it is no_consumer."""
    late = [lag for lag in now.lag if lag.stream.startswith("results") and (lag.unread_s or 0) > LAG_S]
    consumers = [row.name for row in now.processes if row.role == "consumer" and row.is_alive]
    if not late or not consumers:
        return []
    partitions = sum(lag.stream.startswith("results") for lag in now.lag)
    unread, oldest_s = sum(lag.entries - lag.taken for lag in late), max(lag.unread_s or 0 for lag in late)
    who = f"{counted(len(consumers), 'consumer')} for {counted(partitions, 'partition')}"
    if len(consumers) < partitions:
        remedy = "a partition has nobody: start `sluice consume -c CONFIG` once more"
    else:
        remedy = (
            "the consumer is slower than the workers, or hangs in its parse or match function: look at its CPU time "
            "and its log; a new run may have a higher consumer.count"
        )
    says = (
        f"{waiting(unread, 'result')} unread, the oldest for {length(oldest_s)}, beside {who} ({', '.join(consumers)})"
    )
    return [Stall(kind="consumer_lag", says=says, since=now.at - oldest_s, remedy=remedy)]


def credit_used_up(now: Snapshot) -> list[Stall]:
    """The producer waits: who holds the credit, and what frees it."""
    use = now.credit
    waits = [row for row in now.processes if row.role == "producer" and row.is_alive and _waits_for_credit(row)]
    if now.exhausted or not (use.is_used_up or waits):
        return []
    why, do = _why_used_up(now, use)
    free = "nothing is enqueued until the trainer frees some"
    says = f"the credit is used up ({credit(use)}): {free}; {why}"
    blocks = not is_played(now, "trainer")
    return [Stall(kind="credit_exhausted", says=says, since=_first(waits), remedy=do, blocks=blocks)]


def _waits_for_credit(row: Process) -> bool:
    return (row.waiting_for or "").startswith("credit")


def _why_used_up(now: Snapshot, use: CreditUse) -> tuple[str, str]:
    """What holds it, and what to do where that is no mere back-pressure."""
    if "versions" in use.used_up:
        ahead = f"{use.ahead:,} sequences are enqueued of the {use.max_ahead or 0:,} that may come"
        version = (now.latest_version or 0) + 1
        return (
            f"{ahead} before weights v{version}",
            "it ends with the next version; a higher producer.max_staleness lets decoding run further ahead",
        )
    results = sum(lag.entries for lag in now.lag if lag.stream.startswith("results"))
    held = [
        *([counted(now.queued_jobs, "job")] if now.queued_jobs else []),
        *([counted(results, "result")] if results else []),
        *([counted(now.waiting_batches, "batch", "batches")] if now.waiting_batches else []),
        *([counted(now.dead_letters, "dead letter")] if now.dead_letters and "bytes" in use.used_up else []),
    ]
    why = f"held by {', '.join(held)}" if held else "held by sequences on their way"
    if "bytes" in use.used_up and now.dead_letters:
        return (
            why,
            "`sluice dlq replay` or `sluice dlq drop` frees what dead letters hold; or raise producer.max_in_flight_mb",
        )
    limit = "max_in_flight_mb" if "bytes" in use.used_up else "max_in_flight"
    return why, f"it ends as sequences are trained; a higher producer.{limit} lets more be under way"


def runs_alone(now: Snapshot) -> list[Stall]:
    """Suspects: jobs over which workers died."""
    if now.depth is None or not now.depth.alone:
        return []
    jobs = counted(now.depth.alone, "job")
    says = f"{jobs} over which workers died run apart from others: a worker empties itself first"
    remedy = "it ends by itself; a job that goes on to kill workers becomes a dead letter: `sluice dlq list`"
    return [Stall(kind="runs_alone", says=says, remedy=remedy, blocks=False)]


def unreadable(now: Snapshot) -> list[Stall]:
    """Entries of the run that no reader of this release can read."""
    if not now.unreadable:
        return []
    some = "; ".join(now.unreadable[:_SHOWN_ENTRIES])
    more = f"; and {len(now.unreadable) - _SHOWN_ENTRIES} more" if len(now.unreadable) > _SHOWN_ENTRIES else ""
    number = counted(len(now.unreadable), "entry", "entries")
    says = f"{number} of the run in the broker cannot be read and left out: {some}{more}"
    remedy = (
        "where a newer release writes it, upgrade this one; else delete the entry (HDEL, XDEL) or the key (DEL) with "
        "redis-cli: its process, if it lives, writes it anew"
    )
    return [Stall(kind="unreadable", says=says, remedy=remedy, blocks=False)]


def stalls(now: Snapshot) -> list[Stall]:
    """What keeps the run, of a close look (inspection.inspect)."""
    if now.complete or not (now.enqueued or now.processes or now.unreadable):
        return []
    found = [*broker_full(now), *unreadable(now), *failed(now)]
    if not any(row.is_alive and not row.is_onlooker for row in now.processes):
        return [*found, _no_process(now)]
    found += [*nobody(now), *old_versions(now), *consumer_lag(now)]
    return [*found, *credit_used_up(now), *runs_alone(now)]


def _no_process(now: Snapshot) -> Stall:
    return Stall(
        kind="no_process",
        says=f"no process is alive, {now.credit.sequences:,} sequences are in flight",
        since=max((row.ended_at or row.at for row in now.processes), default=None),
        remedy="start `sluice run` or `sluice up` again with the same configuration: it goes on from here",
    )
