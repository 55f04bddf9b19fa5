"""The demo's report: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from sluice.consumers.training.step_log import read_steps
from sluice.demo.charts import Line, bar_chart, line_chart
from sluice.demo.drill import Drill
from sluice.demo.heldout import Heldout
from sluice.demo.mid_sequence import MidSequence
from sluice.demo.tasks import DemoTask
from sluice.pipeline.files import write_atomic


def write(
    run_dir: Path,
    task: DemoTask,
    *,
    summary: dict[str, Any],
    drill: Drill,
    heldout: Heldout,
    landed: MidSequence | None = None,
) -> Path:
    """Write report.html into the run's directory and return its path."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent / "pages"), autoescape=True)
    steps = read_steps(run_dir / "metrics.jsonl")
    charts = [_score_chart(task, summary, drill, steps), _flow_chart(drill), _rate_chart(drill)]
    charts += [_span_chart(landed)] if landed else []
    charts += [_turns_chart(drill, steps)] if "turns" in task.also else []
    page = templates.get_template(task.page).render(
        run=run_dir.name,
        task=task,
        cards=_cards(task, summary) + guard_cards(steps),
        charts=charts,
        shown=task.show(heldout.problems, heldout.before, heldout.after),
    )
    target = run_dir / "report.html"
    write_atomic(target, page)
    return target.resolve()


def guard_cards(steps: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Counts of the repeat guard over the whole run; empty if it was off."""
    if not any(step.get("rollout/repeat_terminate_active") for step in steps):
        return []
    names = {"ended as loops": "triggered_sequences", "tokens saved": "tokens_saved"}
    return [(title, int(steps[-1].get(f"total/rollout/repeat_terminate_{key}", 0))) for title, key in names.items()]


def _cards(task: DemoTask, summary: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {
        "sequences trained": "trained",
        "lost": "lost",
        "trained twice": "duplicated",
        "dead": "dead",
        "dropped": "dropped",
        "workers killed": "worker_kills",
        "weight versions": "versions",
        "landed mid-sequence": "mid_sequence_updates",
    }
    return [
        (f"{task.metric_title}, warm start", f"{summary[f'{task.metric}_warm']:.2f}"),
        (f"{task.metric_title}, final", f"{summary[f'{task.metric}_final']:.2f}"),
        *((title, summary[key]) for title, key in names.items() if key in summary),
        ("pipeline", f"{summary['pipeline_s']:.0f} s"),
    ]


def _score_chart(task: DemoTask, summary: dict[str, Any], drill: Drill, steps: list[dict[str, Any]]) -> str:
    heldout = [(0.0, float(summary[f"{task.metric}_warm"]))]
    heldout += [(score["version"], score[task.metric]) for score in drill.scores() if score["version"] > 0]
    heldout.append((float(summary["versions"]), float(summary[f"{task.metric}_final"])))
    key = task.rollouts.key
    rollouts = [(float(step["version"]), float(step[key])) for step in steps if key in step]
    lines = [Line("held out, greedy", heldout), Line(task.rollouts.name, rollouts)]
    title = task.metric_title.removeprefix("held-out ").capitalize()
    return line_chart(f"{title} over weight versions", "weight version", lines, top=1.0)


def _flow_chart(drill: Drill) -> str:
    lines = [
        Line("decoded", [(moment.at_s, float(moment.committed)) for moment in drill.timeline]),
        Line("trained", [(moment.at_s, float(moment.trained)) for moment in drill.timeline]),
    ]
    return line_chart("Sequences", "seconds", lines, mark=drill.kill_at_s)


def _rate_chart(drill: Drill, window_s: float = 5.0) -> str:
    points: list[tuple[float, float]] = []
    start = 0
    for index, moment in enumerate(drill.timeline):
        while moment.at_s - drill.timeline[start].at_s > window_s:
            start += 1
        span = moment.at_s - drill.timeline[start].at_s
        if index > start and span > window_s / 2:
            points.append((moment.at_s, (moment.tokens - drill.timeline[start].tokens) / span))
    return line_chart("Decoded tokens per second", "seconds", [Line("tokens/s", points)], mark=drill.kill_at_s)


def _span_chart(landed: MidSequence) -> str:
    bars = [(str(versions), float(count)) for versions, count in landed.spans.items()]
    return bar_chart("Weight versions within one trained sequence", "versions", "sequences", bars)


def _turns_chart(drill: Drill, steps: list[dict[str, Any]]) -> str:
    key = "rollout/num_turns"
    lines = [
        Line("held out, greedy", [(score["version"], score["turns"]) for score in drill.scores() if "turns" in score]),
        Line(
            "training rollouts, sampled", [(float(step["version"]), float(step[key])) for step in steps if key in step]
        ),
    ]
    return line_chart("Turns of a rollout over weight versions", "weight version", lines)
