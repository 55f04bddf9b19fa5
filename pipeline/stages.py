"""The stages of a run, each with one sentence: what it does, or what it waits for and since when. Pure.

producer, gateway ─▶ queue ─▶ worker ─▶ results ─▶ consumer ─▶ batches ─▶ trainer ─▶ weights
                                                             scorer ◀──┘
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pipeline.rates import Rates
from pipeline.stages_stored import batches, queue, results, weights
from pipeline.status import Snapshot
from pipeline.status_parts import Process, Stall, StallKind
from pipeline.status_words import counted, length

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
