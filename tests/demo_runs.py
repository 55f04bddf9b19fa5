"""A made-up finished run of a demo, for tests of its report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sluice.consumers.training.step_log import StepLog
from sluice.demo import answers, report
from sluice.demo.drill import Drill, Moment
from sluice.demo.kill_cost import Kill, KillCost, TakenOver
from sluice.demo.report import Report
from sluice.demo.tasks import DemoTask
from sluice.pipeline.config.types import Config

START = 1000.0
STEPS = 8


def report_of(
    run_dir: Path, task: DemoTask, *, killed: bool = False, turns: float | None = None, **counts: int
) -> Report:
    """Eight steps, a second each; the held-out score goes from 0.1 to 0.9. Writes the files that the report reads."""
    config = Config(run=run_dir.name, run_dir=str(run_dir.parent))
    drill = Drill(task, config, run_dir / "evals.jsonl", kill=True)
    drill.timeline = [Moment(float(at), START + at, at * 100, at, at, at) for at in range(STEPS + 1)]
    log = StepLog(run_dir / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        values: dict[str, float] = {"at": START + step, "version": step - 1, "train/loss": 1 / step}
        values |= {task.rollouts.key: 0.5, "rollout/gen_new_tokens_total": 100.0}
        log.append(step, **values, **({} if turns is None else {"rollout/num_turns": turns}))
    problems = task.heldout(answers.SHOWN, 0)
    with (run_dir / "evals.jsonl").open("w") as stream:
        for version in (0, 4, STEPS):
            score = {task.metric: 0.1 + 0.1 * version} | dict.fromkeys(task.also, 2.0)
            stream.write(json.dumps({"version": version, "at": START + version, **score}) + "\n")
            view = answers.AnswerView([f"answer {version}"], "right", "good")
            kept = answers.Answers(version, START + version, [view] * len(problems))
            answers.keep(run_dir / answers.FILE, kept)
        stream.write(f'{{"version": 2, "{task.metric}"')  # cut off
    cost = None
    if killed:
        drill.kill = Kill("worker-1", 7, START + 3.5, 3.5, running=2, back_s=1.5)
        jobs = [TakenOver(name, START + 3.0, START + 3.9, START + 4.1, "worker-0", START + 5.0) for name in "ab"]
        cost = KillCost(drill.kill, jobs, 2, 2, {}, decoded_again=16, restored=0, decoded_twice=3)
    names = ("enqueued", "trained", "lost", "duplicated", "dead", "dropped")
    summary: dict[str, Any] = dict.fromkeys(names, 0) | {"worker_kills": int(killed), "versions": STEPS} | counts
    summary |= {f"{task.metric}_warm": 0.1, f"{task.metric}_final": 0.9, "pipeline_s": 3.0, "wall_s": 4.0}
    return Report(task, summary, drill, problems, cost)


def written(run_dir: Path, told: Report) -> str:
    """The page's text."""
    return report.write(run_dir, told).read_text()


def without_scripts(text: str) -> str:
    """The page without what its scripts and styles hold."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


def inlined(text: str) -> dict[str, Any]:
    """The data of its curves."""
    (data,) = re.findall(r'<script type="application/json" id="curves-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)
