"""Held-out problems with the answers of two models: the warm start and the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.demo.evaluator import decode
from sluice.demo.tasks import DemoTask

SEED = 77


@dataclass(frozen=True)
class Heldout:
    """`before[i]` and `after[i]` answer `problems[i]`."""

    problems: Sequence[Any]
    before: Sequence[Any]
    after: Sequence[Any]

    @classmethod
    def of(cls, task: DemoTask, warm: Path, final: Path, count: int | None = None) -> Heldout:
        """Decode the task's held-out problems (or `count` of them) greedily with both models."""
        chosen = task.heldout(task.num_heldout if count is None else count, SEED)
        return cls(chosen, decode(task, warm, chosen), decode(task, final, chosen))

    def first(self, count: int) -> Heldout:
        """Only the first problems."""
        return Heldout(self.problems[:count], self.before[:count], self.after[:count])

    def scores(self, task: DemoTask) -> dict[str, float]:
        """`<metric>_warm` and `<metric>_final`, rounded to 4 digits, and the same for the task's other keys."""
        warm, final = (task.score(answers, self.problems) for answers in (self.before, self.after))
        return {
            f"{key}_{name}": round(score[key], 4)
            for key in (task.metric, *task.also)
            for name, score in (("warm", warm), ("final", final))
        }
