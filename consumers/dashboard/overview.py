"""The overview: the flow, what each stage does or waits for, what has stalled and how to resolve it, and the numbers.

The same numbers for Prometheus: `/metrics`, and `/metrics/targets` with the metrics addresses of the run's processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sluice.consumers.dashboard import live
from sluice.consumers.dashboard.formats import NOTHING, figure, rate, span
from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.render import render
from sluice.pipeline.status.descriptions import StageText, StallText, guard_counts, stage_text, stall_text
from sluice.pipeline.status.snapshot import Snapshot, Stall
from sluice.pipeline.status.stages import Stage, is_optional
from sluice.pipeline.telemetry import run_metrics
from sluice.pipeline.telemetry.families import CONTENT_TYPE

router = APIRouter()
_SERIES = (
    ("tokens", "Tokens decoded", "tok/s"),
    ("committed", "Sequences decoded", "seq/s"),
    ("trained", "Sequences trained", "seq/s"),
)
_TITLES = {
    "producer": "Producer", "queue": "Queue", "worker": "Workers", "results": "Results", "consumer": "Consumer",
    "batches": "Batches", "trainer": "Trainer", "weights": "Weights", "gateway": "Gateways", "scorer": "Scorers",
}  # fmt: skip
_LEADS = {"weights": "to the workers", "gateway": "to the queue", "scorer": "to the trainer"}
_LEADING = {
    "train/loss": "Loss", "policy/loss": "Policy loss", "policy/reward_mean": "Reward", "rollout/f1": "F1",
    "policy/version_lag_mean": "Versions old", "policy/clip_ratio": "Clipped", "policy/approx_kl": "KL",
    "train/learning_rate": "Learning rate", "train/grad_norm": "Gradient norm",
    "rollout/gen_new_tokens_mean": "Tokens a sequence", "train/step_s": "Seconds a step",
}  # fmt: skip
_LASTING_S = 30.0
_BRIEF = 130  # characters
_WIDTH, _HEIGHT = 240, 40


class Spark(NamedTuple):
    """One small chart; `line` and `area` are points of an SVG of `_WIDTH` × `_HEIGHT`."""

    title: str
    now: str
    unit: str
    most: str
    line: str
    area: str


class Box(NamedTuple):
    """One stage of the flow, with its text."""

    stage: Stage
    text: StageText

    @property
    def says(self) -> str:
        """What it does or waits for; a long text without its detail."""
        return self.text.says if len(self.text.says) <= _BRIEF else self.text.brief


class Keeper(NamedTuple):
    """A stall, with its text."""

    stall: Stall
    text: StallText


class Sum(NamedTuple):
    """One number in the page head."""

    name: str
    value: str
    more: str = ""


@router.get("/")
async def overview(request: Request) -> Response:
    """The page, with the newest snapshot."""
    monitor = monitor_of(request)
    return render(request, "overview.html.j2", **_parts(monitor), **_stalls(monitor), **_metrics(monitor))


def _parts(monitor: Monitor) -> dict[str, Any]:
    now = monitor.newest
    return {
        "stages": _flow(monitor),
        "titles": _TITLES,
        "leads": _LEADS,
        "sums": _sums(now, monitor),
        "sparks": [_spark(monitor, *one) for one in _SERIES],
        "leading": {title: figure(now.metrics[name]) for name, title in _LEADING.items() if name in now.metrics},
    }


def _stalls(monitor: Monitor) -> dict[str, Any]:
    """What blocks the run, and waits that should have ended by themselves."""
    now = monitor.newest
    lasting = [stall for stall in now.stalls if not stall.blocks and now.at - (stall.since or 0) > _LASTING_S]
    return {
        "blocked": [Keeper(stall, stall_text(now, stall)) for stall in now.stalls if stall.blocks],
        "lasting": [Keeper(stall, stall_text(now, stall)) for stall in lasting],
    }


def _metrics(monitor: Monitor) -> dict[str, Any]:
    return {"metrics": {name: figure(value) for name, value in sorted(monitor.newest.metrics.items())}}


def _flow(monitor: Monitor) -> list[Box]:
    """The main line first; side stages only if this run has them."""
    found = {stage.name: stage for stage in monitor.stages()}
    stages = [found[name] for name in _TITLES if name in found]
    shown = [stage for stage in stages if stage.state != "off" or not is_optional(stage.name)]
    return [Box(stage, stage_text(monitor.newest, stage)) for stage in shown]


def _sums(now: Snapshot, monitor: Monitor) -> list[Sum]:
    eta, (ended, saved) = monitor.rates.eta_s, guard_counts(now)
    most = now.credit.max_sequences
    version = NOTHING if now.latest_version is None else f"v{now.latest_version}"
    return [
        Sum("Enqueued", f"{now.enqueued:,}", "" if now.total is None else f"of {now.total:,} in the data"),
        Sum("In flight", f"{now.credit.sequences:,}", "" if most is None else f"{most:,} at most"),
        Sum("Trained", f"{now.trained:,}", f"{rate(monitor.rates.per_s('trained'))} seq/s"),
        Sum("Dead", f"{now.dead:,}", f"{now.dead_letters:,} can be replayed" if now.dead_letters else ""),
        Sum("Dropped", f"{now.dropped:,}"),
        Sum("Tokens", f"{now.tokens:,}", f"{rate(monitor.rates.per_s('tokens'))} tok/s"),
        Sum("Weights", version, _served(now)),
        Sum("Guard", f"{ended:,} ended", f"{saved:,} tokens saved"),
        Sum("Time left", "done" if now.complete else NOTHING if eta is None else span(eta)),
    ]


def _served(now: Snapshot) -> str:
    """How far the workers are behind the newest version."""
    if now.latest_version is None:
        return ""
    if not now.alive("worker"):
        return "no worker serves them"
    return f"a worker is {now.version_lag} behind" if now.version_lag else "all workers have them"


def _spark(monitor: Monitor, name: str, title: str, unit: str) -> Spark:
    series = monitor.rates.series(name)
    line = points(series)
    area = f"0,{_HEIGHT} {line} {_WIDTH},{_HEIGHT}" if line else ""
    return Spark(title, rate(monitor.rates.per_s(name)), unit, rate(max(series, default=0.0)), line, area)


def points(series: Sequence[float]) -> str:
    """SVG points of a line across the full width; empty for fewer than two values."""
    if len(series) < 2:
        return ""
    most = max(series) or 1.0
    step = _WIDTH / (len(series) - 1)
    return " ".join(
        f"{at * step:.1f},{_HEIGHT - 1 - value / most * (_HEIGHT - 3):.1f}" for at, value in enumerate(series)
    )


live.add("overview", "overview_live.html.j2", _parts)
live.add("heard", "heard.html.j2", _stalls)
live.add("stalls", "stalls.html.j2", _stalls)
live.add("metrics", "metrics.html.j2", _metrics)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Run-level metrics of the newest snapshot."""
    return Response(run_metrics.run_page(monitor_of(request).newest), media_type=CONTENT_TYPE)


@router.get("/metrics/targets")
async def targets(request: Request) -> Response:
    """Prometheus' HTTP service discovery."""
    return JSONResponse(run_metrics.targets(monitor_of(request).newest))
