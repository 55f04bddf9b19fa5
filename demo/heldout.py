"""Held-out problems: their answers by the warm start and the trained model, and the scores of the versions between.

The run's own evaluator has those answered (`eval` in the configuration); no process that trains ever sees them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.demo.answers import FILE, SHOWN, Answers, keep
from sluice.demo.tasks import DemoTask
from sluice.workers.engine.generation_engine import GenerationEngine
from sluice.workers.engine.requests import (
    GenerationOptions,
    ModelLoadConfig,
    TextGenerationRequest,
    VlmGenerationRequest,
)

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


def decode(task: DemoTask, model_dir: Path, chosen: Sequence[Any]) -> Sequence[Any]:
    """Greedy answers of the model in a directory: texts, or the task's own answer type."""
    if task.answers is not None:
        return task.answers(model_dir, chosen)
    model = ModelLoadConfig(model_name_or_path=str(model_dir))
    options = GenerationOptions(max_new_tokens=task.max_new_tokens)
    with GenerationEngine(model, max_batch=64) as engine:
        if task.images is None:
            texts = [TextGenerationRequest(messages=task.messages(one)) for one in chosen]
            results = engine.generate_text_batch(texts, options)
        else:
            seen = [VlmGenerationRequest(messages=task.messages(one), images=task.images(one)) for one in chosen]
            results = engine.generate_vlm_batch(seen, options)
    return [result.text for result in results]


def record(task: DemoTask, out: Path, version: int, at: float, chosen: Sequence[Any], answers: Sequence[Any]) -> None:
    """Append the score to `out`, and what the report shows of the first answers to the file beside it."""
    views = [task.answer_view(problem, one) for problem, one in zip(chosen[:SHOWN], answers[:SHOWN], strict=True)]
    keep(out.with_name(FILE), Answers(version, at, views))
    with out.open("a") as stream:
        stream.write(json.dumps({"version": version, "at": at, **task.score(answers, chosen)}) + "\n")
