"""The stages of a run, each with one sentence: what it does, or what it waits for and since when. Pure.

producer, gateway ─▶ queue ─▶ worker ─▶ results ─▶ consumer ─▶ batches ─▶ trainer ─▶ weights
                                                             scorer ◀──┘
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sluice.pipeline.status.rates import Rates
from sluice.pipeline.status.snapshot import Lag, Process, Snapshot, Stall, StallKind
from sluice.pipeline.status.text import counted, length

Told = tuple[Literal["working", "waiting", "stalled", "done", "off"], str, str, str]


def queue(now: Snapshot, rates: Rates) -> Told:
    """Jobs that wait or run."""
    count, rate = counted(now.queued_jobs, "job"), f"{rates.per_s('committed'):,.1f} seq/s"
    if not now.queued_jobs:
        if now.exhausted:
            return "done", count, rate, "no job is left"
        return "waiting", count, rate, _idle(rates, "jobs", "no job waits or runs")
    depth = now.depth
    stuck = any(stall.kind in ("no_worker", "guard_refused") and stall.blocks for stall in now.stalls)
    if depth is None:
        return "stalled" if stuck else "working", count, rate, f"{count} ready or running"
    words = [f"{depth.running:,} running", f"{depth.ready:,} ready"]
    words += [f"{depth.deferred:,} deferred"] if depth.deferred else []
    words += [f"{depth.alone:,} to run alone"] if depth.alone else []
    oldest = "" if depth.oldest_s is None else f"; the next one was enqueued {length(depth.oldest_s)} ago"
    state = "stalled" if stuck else "working" if depth.running else "waiting"
    return state, count, rate, f"{', '.join(words)}{oldest}"


def results(now: Snapshot, rates: Rates) -> Told:
    """Finished sequences that the consumers have not handed on."""
    lags = [lag for lag in now.lag if lag.stream.startswith("results")]
    stuck = any(stall.kind in ("no_consumer", "consumer_lag") for stall in now.stalls)
    return _stream(lags, rates, ("result", "results"), "the consumers", "committed", stuck=stuck)


def batches(now: Snapshot, rates: Rates) -> Told:
    """Batches that the trainer has not acked."""
    lags = [lag for lag in now.lag if lag.stream == "batches"]
    stuck = any(stall.kind in ("no_trainer", "trainer_dead") for stall in now.stalls)
    return _stream(lags, rates, ("batch", "batches"), "the trainer", "accepted", stuck=stuck)


def weights(now: Snapshot, rates: Rates) -> Told:
    """The newest version, and how far behind it the workers are."""
    if now.latest_version is None:
        says = "no weights are registered yet: the trainer does it once its model is loaded"
        return "waiting", "none", "", _idle(rates, "weights", says)
    age = "" if now.latest_at is None else f", published {length(now.at - now.latest_at)} ago"
    lag = now.version_lag
    behind = f"the oldest live worker is {counted(lag, 'version')} behind" if lag else "every live worker has it"
    if not now.alive("worker"):
        behind = "no live worker"
    state = "stalled" if any(stall.kind == "old_versions" and stall.blocks for stall in now.stalls) else "working"
    return "done" if now.complete else state, f"v{now.latest_version}", "", f"v{now.latest_version}{age}; {behind}"


def _stream(lags: list[Lag], rates: Rates, names: tuple[str, str], reader: str, passes: str, *, stuck: bool) -> Told:
    entries, taken = sum(lag.entries for lag in lags), sum(lag.taken for lag in lags)
    count, rate = counted(entries, *names), f"{rates.per_s(passes):,.1f} seq/s"
    if not entries:
        return "waiting", count, rate, _idle(rates, names[1], f"no {names[0]} waits for {reader}")
    oldest = max((lag.oldest_s for lag in lags if lag.oldest_s is not None), default=0.0)
    says = f"{entries - taken:,} unread, {taken:,} in the hands of {reader}; the oldest came {length(oldest)} ago"
    return "stalled" if stuck else "working" if taken else "waiting", count, rate, says


def _idle(rates: Rates, name: str, says: str) -> str:
    """With since when, as far as this process saw it."""
    seen = rates.idle(name)
    if seen is None:
        return says
    return f"{says} (for {'' if seen[1] else 'at least '}{length(seen[0])})"


StageName = Literal[
    "producer", "gateway", "queue", "worker", "results", "consumer", "batches", "trainer", "weights", "scorer"
]
StageState = Literal["working", "waiting", "stalled", "done", "off"]
_STORED = {"queue": queue, "results": results, "batches": batches, "weights": weights}
_KINDS: dict[StageName, tuple[StallKind, ...]] = {
    "producer": ("no_producer", "credit_exhausted"),
    "gateway": ("no_gateway",),
    "queue": ("runs_alone",),
    "worker": ("guard_refused", "no_worker", "old_versions"),
    "results": (),
    "consumer": ("no_consumer", "consumer_lag"),
    "batches": (),
    "trainer": ("trainer_dead", "no_trainer"),
    "weights": (),
    "scorer": ("no_scorer",),
}


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One box of the flow."""

    name: StageName
    state: StageState
    count: str  # what is in it now, short
    rate: str  # how fast things pass, empty where nothing does
    says: str  # one plain sentence


def stages(now: Snapshot, rates: Rates) -> list[Stage]:
    """All of them, in the order of the flow; a role that this run has no use for is `off`."""
    return [_stage(now, rates, name) for name in get_args(StageName)]


def _stage(now: Snapshot, rates: Rates, name: StageName) -> Stage:
    if name in _STORED:
        state, count, rate, says = _STORED[name](now, rates)
        state = "done" if now.complete else state
        return Stage(name=name, state=state, count=count, rate=rate, says=says)
    rows = [row for row in now.processes if row.role == name and row.is_alive]
    state, says = _role(now, name, rows)
    return Stage(name=name, state=state, count=f"{len(rows)} alive", rate=_rate(rates, name), says=says)


def _role(now: Snapshot, name: StageName, rows: list[Process]) -> tuple[StageState, str]:
    stall = next((stall for stall in now.stalls if stall.kind in _KINDS[name]), None) or _failure(now, name)
    if stall is not None and stall.blocks:
        return "stalled", _since(now, stall)
    if now.complete and (rows or name not in ("gateway", "scorer")):
        return "done", "the run is complete"
    if name == "producer" and now.exhausted and not rows:
        return "done", "all rows are enqueued"
    if not rows:
        return "off", f"no {name} is alive, and nothing waits for one"
    busy = [row for row in rows if row.waiting_for is None]
    waits = max((row for row in rows if row.waiting_for), key=lambda row: row.waiting_s or 0, default=None)
    if busy or waits is None:
        others = f"; {waits.name} waits for {waits.waiting_for}" if waits else ""
        return "working", f"{_names(busy)} at work{others}"
    if stall is not None:
        return "waiting", _since(now, stall)
    more = f" (and {counted(len(rows) - 1, 'other')})" if len(rows) > 1 else ""
    return "waiting", f"{waits.name}{more} waits for {waits.waiting_for}, {length(waits.waiting_s or 0)}"


def _failure(now: Snapshot, name: StageName) -> Stall | None:
    """That of a process of this role: its sentence begins with the process's name."""
    names = {row.name for row in now.processes if row.role == name and row.ended_at is not None}
    stalls = (stall for stall in now.stalls if stall.kind in ("process_failed", "guard_refused"))
    return next((stall for stall in stalls if stall.says.partition(" ")[0] in names), None)


def _since(now: Snapshot, stall: Stall) -> str:
    return stall.says if stall.since is None else f"{stall.says} (for {length(now.at - stall.since)})"


def _names(rows: list[Process]) -> str:
    shown = ", ".join(row.name for row in rows[:3])
    verb = "is" if len(rows) == 1 else "are"
    return f"{shown} {verb}" if len(rows) <= 3 else f"{shown} and {len(rows) - 3} more are"


def _rate(rates: Rates, name: StageName) -> str:
    shown = {"producer": ("enqueued", "seq/s"), "worker": ("tokens", "tok/s"), "consumer": ("accepted", "seq/s")}
    shown["trainer"] = ("trained", "seq/s")
    if name not in shown:
        return ""
    count, unit = shown[name]
    return f"{rates.per_s(count):,.1f} {unit}"
