"""The demo's actions while the pipeline runs: kill a worker, follow the held-out score, record a timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sluice.consumers.evaluation.results import FOLDER, Answer, evaluations, read_answers
from sluice.consumers.history.curves import LineFile, Score, score_of
from sluice.demo.heldout import SEED, record
from sluice.demo.kill_cost import Kill
from sluice.demo.tasks import DemoTask
from sluice.pipeline.config import Config
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot

_KILL_AT, _KILL_LATEST = 0.25, 0.5  # of the sequences decoded
_FRESH_S = 0.5
EVALUATED = "eval/sequences"  # in every line of the run's evaluator
_VICTIM = "worker-1"


@dataclass(frozen=True)
class Moment:
    """One point of the timeline; seconds since the start, counts so far."""

    at_s: float
    at: float  # Unix time
    tokens: int
    committed: int
    trained: int
    version: int


class Drill:
    """`watch` is called with every snapshot of the run."""

    def __init__(self, task: DemoTask, config: Config, evals: Path, *, kill: bool) -> None:
        self.task, self.config, self.evals = task, config, evals
        self.kill: Kill | None = None
        self._scores = LineFile(evals, score_of)
        self.timeline: list[Moment] = []
        self._armed = kill and config.worker.count > 1
        self._started = time.monotonic()
        self._problems: Sequence[Any] = ()

    def scores(self) -> list[Score]:
        """Held-out scores so far, as they were written. Others may append theirs to the file: those are left out."""
        self._scores.refresh()
        if self._record_new():
            self._scores.refresh()
        return [score for score in self._scores.rows if self.task.metric in score.values]

    def _record_new(self) -> bool:
        """Score what the run's evaluator has finished by the demo's own measure: F1 at another IoU, say."""
        rows: list[Score] = self._scores.rows
        known = {one.version for one in rows if self.task.metric in one.values}
        new = [one for one in rows if EVALUATED in one.values and one.version not in known]
        files = dict(evaluations(self.evals.parent / FOLDER)) if new else {}
        for one in new:
            given = {answer.row: answer for answer in read_answers(files[one.version])}
            self._problems = self._problems or self.task.heldout(self.task.num_followed, SEED)
            places = range(len(self._problems))
            answers = [self.task.answer_of(given.get(at, Answer(row=at, index=0))) for at in places]
            record(self.task, self.evals, one.version, one.at, self._problems, answers)
        return bool(new)

    async def watch(self, now: Snapshot, supervisor: Supervisor, progress: Progress) -> None:
        """Update timeline and score, and kill the worker when it's time."""
        at_s = time.monotonic() - self._started
        self.timeline.append(Moment(at_s, time.time(), now.tokens, now.committed, now.trained, now.latest_version or 0))
        scores = self.scores()
        if scores:
            newest = scores[-1]
            progress.extra[self.task.metric_title] = f"{newest.values[self.task.metric]:.2f} (v{newest.version})"
        if self._armed and self._is_time(now):
            self._armed = False
            killed_at = time.time()
            pid = supervisor.kill(_VICTIM)
            self.kill = Kill(_VICTIM, pid, killed_at, at_s, running=_running(now), heldout=now.evaluating_jobs)
            progress.say(f"SIGKILL to {_VICTIM} (pid {pid}) while it decodes")
        elif self.kill is not None and self.kill.back_s is None:
            self.kill = self._with_successor(self.kill, now)

    def _with_successor(self, kill: Kill, now: Snapshot) -> Kill:
        row = now.process(kill.worker)
        if row is None or row.pid == kill.pid or row.ended_at is not None:
            return kill
        return replace(kill, back_s=max(0.0, row.at - kill.at))

    def _is_time(self, now: Snapshot) -> bool:
        """With a full batch a quarter through, by a heartbeat that is fresh; half through, whenever it decodes.

        Not amid held-out prompts, until half through: the kill is to cost training rollouts, which must all be trained.
        """
        row = now.process(_VICTIM)
        if now.total is None or row is None or not row.is_alive or now.committed < _KILL_AT * now.total:
            return False
        if now.committed >= _KILL_LATEST * now.total:
            return _running(now) > 0
        return not now.evaluating_jobs and row.age_s <= _FRESH_S and _running(now) >= self.config.worker.max_batch // 2


def _running(now: Snapshot) -> int:
    """Sequences in the victim, by its last heartbeat."""
    row = now.process(_VICTIM)
    return int(row.facts.get("running", 0)) if row is not None and row.is_alive else 0
