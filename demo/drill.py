"""The demo's actions while the pipeline runs: kill a worker, follow the held-out score, record a timeline."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sluice.demo.tasks import DemoTask
from sluice.pipeline.config import Config
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot

_EVAL_SEED = 78
_KILL_AT = 0.25  # of the sequences decoded
_VICTIM = "worker-1"


@dataclass(frozen=True)
class Moment:
    """One point of the timeline; seconds since the start, counts so far."""

    at_s: float
    tokens: int
    committed: int
    trained: int
    version: int


class Drill:
    """`watch` is called with every snapshot of the run."""

    def __init__(self, task: DemoTask, config: Config, evals: Path, *, kill: bool) -> None:
        self.task, self.config, self.evals = task, config, evals
        self.kills = 0
        self.kill_at_s: float | None = None
        self.timeline: list[Moment] = []
        self._armed = kill and config.worker.count > 1
        self._started = time.monotonic()

    def processes(self) -> dict[str, list[str]]:
        """The evaluator, which runs next to the roles."""
        versions = self.evals.parent / "weights"
        count = self.task.num_heldout // 2
        arguments = [self.task.name, str(versions), str(self.evals), str(count), str(_EVAL_SEED)]
        return {"evaluator": [sys.executable, "-m", "sluice.demo.evaluator", *arguments]}

    def scores(self) -> list[dict[str, float]]:
        """Held-out scores so far, by version."""
        if not self.evals.exists():
            return []
        return [json.loads(line) for line in self.evals.read_text().splitlines() if line.endswith("}")]

    async def watch(self, now: Snapshot, supervisor: Supervisor, progress: Progress) -> None:
        """Update timeline and score, and kill the worker when it's time."""
        at_s = time.monotonic() - self._started
        self.timeline.append(Moment(at_s, now.tokens, now.committed, now.trained, now.latest_version or 0))
        scores = self.scores()
        if scores:
            score, version = scores[-1][self.task.metric], scores[-1]["version"]
            progress.extra[self.task.metric_title] = f"{score:.2f} (v{version:.0f})"
        if self._armed and self._is_time(now):
            self._armed = False
            pid = supervisor.kill(_VICTIM)
            self.kills, self.kill_at_s = self.kills + 1, at_s
            progress.say(f"SIGKILL to {_VICTIM} (pid {pid}) while it decodes")

    def _is_time(self, now: Snapshot) -> bool:
        if now.total is None or now.committed < _KILL_AT * now.total:
            return False
        return any(row.name == _VICTIM and int(row.facts.get("running", 0)) > 0 for row in now.alive("worker"))
