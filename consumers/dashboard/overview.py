"""The overview: a verdict, the curves, where time goes, and the flow from the producer to the trainer.

The same numbers for Prometheus: `/metrics`, and `/metrics/targets` with the metrics addresses of the run's processes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.render import NOTHING, figure, live, rate, render, span
from sluice.consumers.history.curves import Chart
from sluice.pipeline.status.descriptions import (
    StageText,
    StallText,
    again,
    guard_counts,
    headline,
    stage_text,
    stall_text,
    verdict_text,
)
from sluice.pipeline.status.run_end import RunEnd
from sluice.pipeline.status.snapshot import Snapshot, Stall
from sluice.pipeline.status.stages import Stage, is_optional
from sluice.pipeline.status.text import counted, length
from sluice.pipeline.telemetry import families

router = APIRouter()
_TITLES = {
    "producer": "Producer", "queue": "Queue", "worker": "Workers", "results": "Results", "consumer": "Consumer",
    "batches": "Batches", "trainer": "Trainer", "weights": "Weights", "gateway": "Gateways", "scorer": "Scorers",
    "evaluator": "Evaluator",
}  # fmt: skip
_STATES = {
    "complete": ("complete", "good"), "idle": ("not started", ""), "stalled": ("stalled", "bad"),
    "failed": ("failed", "bad"), "stopped": ("stopped", "warn"),
    "killed": ("interrupted", "warn"),
    "moving": ("healthy", "good"), "working": ("healthy", "good"), "waiting": ("waiting", "warn"),
}  # fmt: skip
_STOPPED = {"interrupted": "Interrupted", "killed": "Interrupted", "stopped": "Stopped at trainer.max_versions"}
_FAILED = ("process_failed", "guard_refused", "run_failed")
_LASTING_S = 30.0
WIDTH, _HEIGHT = 240, 48


class Box(NamedTuple):
    """One stage of the flow, with its text."""

    stage: Stage
    text: StageText


class Keeper(NamedTuple):
    """A stall, with its text."""

    stall: Stall
    text: StallText


class Sum(NamedTuple):
    """One number in the page head."""

    name: str
    value: str
    more: str = ""
    href: str = ""  # where what is counted is listed


class Part(NamedTuple):
    """Mean seconds that a sequence spends somewhere; `x` and `width` in a bar of 1000."""

    name: str
    seconds: float
    x: float
    width: float


@router.get("/")
async def overview(request: Request) -> Response:
    """The page, with the newest snapshot."""
    monitor = monitor_of(request)
    await asyncio.to_thread(monitor.read_files)
    drawn = [(chart, points(chart.lines[0].values)) for chart in monitor.curves.drawn]
    parts = {**_verdict(monitor), **_parts(monitor), **_metrics(monitor)}
    return render(request, "overview.html.j2", **parts, charts=drawn)


@router.get("/curves")
async def curves(request: Request) -> Response:
    """The charts as JSON."""
    return charts_json(await asyncio.to_thread(monitor_of(request).curves.charts))


def charts_json(charts: Sequence[Chart]) -> Response:
    """As charts.js reads them."""
    return Response(msgspec.json.encode({"charts": charts}), media_type="application/json")


def _verdict(monitor: Monitor) -> dict[str, Any]:
    """One line, what blocks the run, and waits that should have ended by themselves."""
    now, verdict = monitor.newest, monitor.verdict
    lasting = [stall for stall in now.stalls if not stall.blocks and now.at - (stall.since or 0) > _LASTING_S]
    name, css = _STATES[verdict.state]
    if any(stall.kind in _FAILED and stall.blocks for stall in now.stalls):
        name = "failed"
    unwanted = now.dropped - now.reasons.get("dropped:zero_variance", 0)  # a filter of groups is meant to drop
    if verdict.state == "complete" and (now.dead or unwanted > now.trained):
        css = "warn" if now.trained else "bad"
    change = monitor.curves.change()
    learned = f"{change.name} {change.first:.3g} → {change.last:.3g}" if change else ""
    line, says = headline(now, verdict, monitor.rates.bottleneck, learned), verdict_text(now, verdict)
    stopped = _STOPPED.get(now.end.state, "") if now.end else ""
    if (monitor.stored_at is not None or stopped) and not now.complete and name != "failed":
        name, css = "interrupted" if now.end and now.end.is_halt else "stopped", "warn"
        if now.end and now.end.is_by_evaluations:
            stopped = "Stopped by its evaluations"
        line = f"{stopped or 'Stopped before its end'}: {learned or counted(now.trained, 'sequence') + ' trained'}"
        if not stopped:
            says = f"{counted(now.credit.sequences, 'sequence')} in flight"
    blocked = [stall for stall in now.stalls if stall.blocks]
    if monitor.problem is not None or monitor.seen_at is None:  # what the broker said last is no verdict
        if monitor.problem is not None:
            blocked, lasting = [], list[Stall]()
        name, css, line = _by_files(monitor.end, learned)
        says = f"{monitor.problem or 'the broker does not answer'}, so this is what the run has written"
        if monitor.end is not None and monitor.end.is_halt:
            says = f"it ended {length(time.time() - monitor.end.at)} ago: {again(monitor.end)}; {says}"
    return {
        "headline": line,
        "verdict": (name, css),
        "says": says,
        "blocked": [Keeper(stall, stall_text(now, stall)) for stall in blocked],
        "lasting": [Keeper(stall, stall_text(now, stall)) for stall in lasting],
    }


def _by_files(end: RunEnd | None, learned: str) -> tuple[str, str, str]:
    """State, its look, and headline."""
    if end is not None and end.state == "failed":
        return "failed", "bad", f"Failed: {end.cause}"
    if end is not None and end.state == "complete":
        return "complete", "good", f"Complete: {learned}" if learned else "Complete"
    if end is not None:
        return (
            "interrupted" if end.is_halt else "stopped",
            "warn",
            ": ".join(filter(None, (_STOPPED[end.state], learned))),
        )
    return "unknown", "warn", f"Its state is unknown: {learned}" if learned else "Nothing is known about this run yet"


def _parts(monitor: Monitor) -> dict[str, Any]:
    return {
        "stages": _flow(monitor),
        "titles": _TITLES,
        "sums": _sums(monitor.newest, monitor),
        "times": stacked(monitor.times),
    }


def _metrics(monitor: Monitor) -> dict[str, Any]:
    return {"metrics": {name: figure(value) for name, value in sorted(monitor.newest.metrics.items())}}


def _flow(monitor: Monitor) -> list[Box]:
    """The main line first; side stages only if this run has them."""
    found = {stage.name: stage for stage in monitor.stages()}
    if monitor.stored_at is not None:  # nothing works on what its broker has stored
        found = {
            name: msgspec.structs.replace(stage, state="off") if stage.state in ("working", "waiting") else stage
            for name, stage in found.items()
        }
    stages = [found[name] for name in _TITLES if name in found]
    shown = [stage for stage in stages if stage.state != "off" or not is_optional(stage.name)]
    return [Box(stage, stage_text(monitor.newest, stage)) for stage in shown]


def _sums(now: Snapshot, monitor: Monitor) -> list[Sum]:
    """The few that one looks for; zeros of what went wrong are left out."""
    eta, (ended, saved) = monitor.rates.eta_s, guard_counts(now)
    step = monitor.curves.newest
    is_going = eta is not None and monitor.verdict.state not in ("stalled", "failed", "stopped", "killed")
    left = "done" if now.complete else span(eta) if is_going else NOTHING
    version = NOTHING if now.latest_version is None else f"v{now.latest_version}"
    most = now.credit.max_sequences
    room = f"{most:,} at most" if most is not None and not now.complete else ""
    of_data = "" if now.total is None else f"of {now.total:,}"
    letters = f"{now.dead_letters:,} can be replayed" if now.dead_letters else ""
    stepped = f"{now.stepped:,} more wait for a checkpoint" if now.stepped else ""
    is_live = monitor.stored_at is None and any(row.is_alive and not row.is_onlooker for row in now.processes)

    def speed(name: str, unit: str) -> str:
        return f"{rate(monitor.rates.per_s(name))} {unit}" if is_live else ""

    found = [
        Sum("Trained", f"{now.trained:,}", "; ".join(filter(None, (of_data, stepped)))),
        Sum("In flight", f"{now.credit.sequences:,}", room),
        Sum("Step", NOTHING if step is None else f"{step.step:,}", speed("trained", "seq/s")),
        Sum("Weights", version, _served(now) if is_live else ""),
        Sum("Tokens", f"{now.tokens:,}", speed("tokens", "tok/s")),
        Sum("Dead", f"{now.dead:,}", letters, "/dead-letters"),
        Sum("Dropped", f"{now.dropped:,}", "see why" if now.dropped else "", "/sequences?state=dropped"),
    ]
    if ended:
        found.append(Sum("Repeat guard", f"{ended:,} ended", f"{saved:,} tokens saved"))
    return [*found, Sum("Time left", left)]


def _served(now: Snapshot) -> str:
    """How far the workers are behind the newest version."""
    if now.latest_version is None:
        return ""
    if not now.alive("worker"):
        return "no worker serves them"
    return f"a worker is {now.version_lag} behind" if now.version_lag else "all workers have them"


def stacked(times: Sequence[tuple[str, float]], total: float | None = None) -> list[Part]:
    """One bar of 1000 units, which are `total` seconds or all of these."""
    x, parts = 0.0, list[Part]()
    total = math.fsum(seconds for _, seconds in times) if total is None else total
    for name, seconds in times:
        width = 1000 * seconds / total if total else 0.0
        parts.append(Part(name, seconds, round(x, 1), round(width, 1)))
        x += width
    return parts if total else []


def points(series: Sequence[float]) -> str:
    """SVG points of a line across the full width; empty for fewer than two values."""
    if len(series) < 2:
        return ""
    least, most = min(0.0, *series), max(series)
    step, height = WIDTH / (len(series) - 1), (most - least) or 1.0
    return " ".join(
        f"{at * step:.1f},{_HEIGHT - 1 - (value - least) / height * (_HEIGHT - 3):.1f}"
        for at, value in enumerate(series)
    )


live("overview", "overview_live.html.j2", _parts)
live("heard", "heard.html.j2", _verdict)
live("verdict", "verdict.html.j2", _verdict)
live("metrics", "metrics.html.j2", _metrics)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Run-level metrics of the newest snapshot."""
    return Response(families.run_page(monitor_of(request).newest), media_type=families.CONTENT_TYPE)


@router.get("/metrics/targets")
async def targets(request: Request) -> Response:
    """Prometheus' HTTP service discovery."""
    return JSONResponse(families.targets(monitor_of(request).newest))
