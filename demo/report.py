"""The demo's report: one HTML file that opens from disk, with nothing to load.

    metrics.jsonl, evals.jsonl, history ─▶ RunCurves, Drill's timeline ─▶ curves (the dashboard's charts.js and uPlot)
    history ─▶ KillCost ─▶ a sentence, a mark on the curves, a row per job
    answers.jsonl ─▶ five problems through time

- Scripts and styles are inlined and named by their hashes in a policy; everything else is refused. Without scripts each
  curve is a still picture.
- A run that was stopped has a report as well: of what it had done by then.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sluice.consumers.history.curves import Chart, Line, RunCurves, line
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.index import HistoryIndex
from sluice.consumers.training.step_log import read_steps
from sluice.demo import answers
from sluice.demo.charts import Mark, bar_chart, still, tick
from sluice.demo.drill import Drill, Moment
from sluice.demo.kill_cost import KillCost
from sluice.demo.mid_sequence import MidSequence
from sluice.demo.tasks import DemoTask
from sluice.pipeline.files import write_atomic

_STATIC = files("sluice.consumers.dashboard") / "static"
_FIRST = ("heldout", "reward", "rollouts", "sequences", "decoding", "loss")  # charts, before all others
_WINDOW_S = 10.0  # over which the decoding rate is counted
_INDEX_S = 20.0
_LEAST_ROW, _MOST_ROW, _ROWS = 3.0, 14.0, 190.0  # heights in the picture of the kill
_WIDTH = 1000.0


@dataclass(frozen=True)
class Report:
    """What is told of a run. `summary` lacks the scores if the run was `stopped`."""

    task: DemoTask
    summary: dict[str, Any]
    drill: Drill
    problems: Sequence[Any]
    cost: KillCost | None = None
    landed: MidSequence | None = None
    stopped: bool = False
    failure: str = ""  # why, if it wasn't a Ctrl-C


@dataclass(frozen=True)
class Figure:
    """A chart with its still picture."""

    chart: Chart
    still: str


@dataclass(frozen=True)
class KillPicture:
    """A row per job, in a box of 1000 by `height`; `labels[i]` stands at the i-th of equal parts of its width."""

    height: float
    kill_x: float
    rows: list[dict[str, float]]
    labels: list[str] = field(default_factory=list[str])


def write(run_dir: Path, told: Report) -> Path:
    """Write report.html into the run's directory and return its path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "pages"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    steps = read_steps(run_dir / "metrics.jsonl")
    marks = _marks(told, steps)
    charts = _charts(run_dir, told, steps)
    columns = answers.through_time(answers.read(run_dir / answers.FILE), told.summary["versions"])
    styles = _texts("sluice.css", "uplot.min.css") + (Path(__file__).parent / "pages" / "report.css").read_text()
    scripts = _texts("uplot.min.js"), _texts("charts.js")
    page = environment.get_template("report.html.j2").render(
        run=run_dir.name,
        task=told.task,
        told=told,
        summary=told.summary,
        kill=told.drill.kill,
        cost=told.cost,
        sums=_sums(told) + guard_sums(steps),
        figures=[Figure(chart, still(chart, marks)) for chart in charts],
        spans=_spans(told.landed),
        data=_safe_json({"charts": charts, "marks": marks}),
        picture=None if told.cost is None else kill_picture(told.cost),
        problems=[told.task.problem_view(one) for one in told.problems],
        columns=columns,
        minutes=_minutes(told.drill),
        styles=styles,
        scripts=scripts,
        policy=_policy(styles, scripts),
    )
    target = run_dir / "report.html"
    write_atomic(target, page)
    return target.resolve()


def guard_sums(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Counts of the repeat guard over the whole run; empty if it was off."""
    if not any(step.get("rollout/repeat_terminate_active") for step in steps):
        return []
    names = {"ended as loops": "triggered_sequences", "tokens saved": "tokens_saved"}
    found = {title: steps[-1].get(f"total/rollout/repeat_terminate_{key}", 0) for title, key in names.items()}
    return [(title, f"{count:,.0f}") for title, count in found.items()]


def _sums(told: Report) -> list[tuple[str, str]]:
    names = {
        "enqueued": "enqueued",
        "trained": "trained",
        "dead": "dead",
        "dropped": "dropped",
        "lost": "lost",
        "trained twice": "duplicated",
        "workers killed": "worker_kills",
        "weight versions": "versions",
        "landed mid-sequence": "mid_sequence_updates",
    }
    found = [(title, f"{told.summary[key]:,}") for title, key in names.items() if key in told.summary]
    return [*found, ("pipeline", f"{told.summary['pipeline_s']:.0f} s")]


def _charts(run_dir: Path, told: Report, steps: list[dict[str, Any]]) -> list[Chart]:
    """The dashboard's charts of this run, and what the demo saw itself."""
    history = history_directory(told.drill.config)
    index = HistoryIndex(history) if history.is_dir() else None
    try:
        if index is not None:
            index.catch_up(_INDEX_S)
        found = {chart.key: chart for chart in RunCurves(run_dir, index).charts()}
    finally:
        if index is not None:
            index.close()
    if "heldout" in found:
        found |= _apart(found["heldout"], told.task)
    own = [_sequences(told.drill, steps), _decoding(told.drill, steps), *_more(told, steps)]
    found |= {chart.key: chart for chart in own if chart.lines}
    first = [found[key] for key in _FIRST if key in found]
    return [*first, *(chart for key, chart in found.items() if key not in _FIRST)]


def _apart(heldout: Chart, task: DemoTask) -> dict[str, Chart]:
    """The held-out scores, all shares, and a chart of what the task counts on the same problems."""
    scores = [one for one in heldout.lines if one.name not in task.also]
    others = [one for one in heldout.lines if one.name in task.also]
    found = {"heldout": msgspec.structs.replace(heldout, unit="share", lines=scores)} if scores else {}
    if others:
        about = "of the held-out problems, decoded greedily"
        found["also"] = _chart("also", "Held out: " + ", ".join(task.also), "mean", about, others)
    return found


def _sequences(drill: Drill, steps: list[dict[str, Any]]) -> Chart:
    at = _step_at(steps)
    counts = {"decoded": [one.committed for one in drill.timeline], "trained": [one.trained for one in drill.timeline]}
    lines = [
        line(name, [(at(one), one.at, float(count)) for one, count in zip(drill.timeline, values, strict=True)])
        for name, values in counts.items()
        if drill.timeline
    ]
    return _chart("sequences", "Sequences", "count", "so far, as the queue counts them", lines)


def _decoding(drill: Drill, steps: list[dict[str, Any]]) -> Chart:
    at = _step_at(steps)
    points: list[tuple[float, float, float]] = []
    start = 0
    busy = [moment for moment in drill.timeline if moment.committed < drill.timeline[-1].committed]
    for index, moment in enumerate(busy):
        while moment.at_s - drill.timeline[start].at_s > _WINDOW_S:
            start += 1
        span = moment.at_s - drill.timeline[start].at_s
        if index > start and span > _WINDOW_S / 2:
            points.append((at(moment), moment.at, (moment.tokens - drill.timeline[start].tokens) / span))
    about = f"tokens of committed sequences, over {_WINDOW_S:.0f} s"
    return _chart("decoding", "Decoding", "tokens/s", about, [line("decoded", points)] if points else [])


def _more(told: Report, steps: list[dict[str, Any]]) -> list[Chart]:
    """What the task counts beside its score."""
    key = "rollout/num_turns"
    points = [(float(step["step"]), float(step["at"]), float(step[key])) for step in steps if key in step]
    if "turns" not in told.task.also or not points:
        return []
    made = [line("training rollouts, sampled", points)]
    return [_chart("turns", "Turns", "mean of a step", "calls of the model in a rollout", made)]


def _chart(key: str, title: str, unit: str, about: str, lines: list[Line]) -> Chart:
    coloured = [msgspec.structs.replace(one, colour=number) for number, one in enumerate(lines)]
    return Chart(key=key, title=title, unit=unit, about=about, lines=coloured)


def _step_at(steps: list[dict[str, Any]]) -> Any:
    """The newest step at a moment."""
    times = [(float(step["at"]), float(step["step"])) for step in steps if "at" in step]

    def found(moment: Moment) -> float:
        return max((step for at, step in times if at <= moment.at), default=0.0)

    return found


def _marks(told: Report, steps: list[dict[str, Any]]) -> list[Mark]:
    kill = told.drill.kill
    if kill is None:
        return []
    step = max((float(one["step"]) for one in steps if one.get("at", kill.at + 1) <= kill.at), default=0.0)
    return [Mark(f"{kill.worker} killed", step, kill.at)]


def _spans(landed: MidSequence | None) -> str:
    """Bars of how many weight versions a trained sequence spans."""
    if landed is None:
        return ""
    return bar_chart("weight versions", [(str(versions), float(count)) for versions, count in landed.spans.items()])


def kill_picture(cost: KillCost) -> KillPicture | None:
    """When each job was held by whom; None if nothing is known of them."""
    if not cost.jobs:
        return None
    kill = cost.kill.at
    times = [time for job in cost.jobs for time in (job.claimed_at, job.next_at, job.ended_at) if time is not None]
    first, last = min(kill, *times), max(kill + 0.1, *times)
    step = tick(last - first, 6)
    before, after = -int(-(kill - first) // step), -int(-(last - kill) // step)
    start, width = kill - before * step, (before + after) * step

    def x(time: float) -> float:
        return round((time - start) / width * _WIDTH, 1)

    size = min(max(_ROWS / len(cost.jobs), _LEAST_ROW), _MOST_ROW)
    rows = [
        {
            "y": round(index * size, 1),
            "height": round(size * 0.8, 1),
            "x": x(job.claimed_at),
            "died": round(x(kill) - x(job.claimed_at), 1),
            "began": x(job.next_at) if job.next_at is not None else _WIDTH,
            "again": round(x(job.ended_at) - x(job.next_at), 1) if job.next_at and job.ended_at else 0.0,
        }
        for index, job in enumerate(cost.jobs)
    ]
    labels = ["kill" if at == 0 else f"{at * step:+g} s".replace("-", "−") for at in range(-before, after)]
    return KillPicture(round(size * len(rows), 1), x(kill), rows, labels)


def _minutes(drill: Drill) -> Any:
    """From a Unix time to `0:42` since the pipeline started."""
    start = drill.timeline[0].at - drill.timeline[0].at_s if drill.timeline else None

    def text(at: float) -> str:
        seconds = 0 if start is None else max(0, round(at - start))
        return f"{seconds // 60}:{seconds % 60:02d}"

    return text


def _texts(*names: str) -> str:
    return "".join((_STATIC / name).read_text() for name in names)


def _safe_json(value: Any) -> str:
    """For a script element: no `<` can end it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _policy(styles: str, scripts: Sequence[str]) -> str:
    """Exactly these scripts and this style, pictures from within, and nothing else."""

    def named(text: str) -> str:
        return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"

    parts = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": named(styles),
        "script-src": " ".join(map(named, scripts)),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in parts.items())
