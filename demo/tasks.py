"""The interface between a task and the demo. The rest of the demo knows no task by name.

    --task NAME ──▶ load_task ──▶ DemoTask: model, data, held-out score, and its part of the report

| task       | learns by                                  | measured by           |
|------------|--------------------------------------------|-----------------------|
| pictures   | teacher forcing, from pixels of PNG files  | F1 of boxes           |
| digits     | the same, from patch tokens in the text    | F1 of boxes           |
| arithmetic | reward of its own groups (decoupled PPO)   | share of right answers|
| tools      | the same, over rollouts with a calculator  | share of right answers|
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.consumers.evaluation.results import Answer
from sluice.demo.answers import AnswerView, ProblemView
from sluice.demo.tiny.warm_start import OnProgress
from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.errors import ConfigError

NAMES = ("pictures", "digits", "arithmetic", "tools")


@dataclass(frozen=True)
class RolloutLine:
    """The score of the training rollouts, which isn't the held-out one."""

    key: str  # in metrics.jsonl
    title: str  # of its curve
    meaning: str  # what is counted, for who compares it with the held-out score


@dataclass(frozen=True)
class DemoTask:
    """One task. `Any` stands for the task's own types of held-out problems and answers."""

    name: str
    title: str  # of the report
    config_file: str  # under configs/
    metric: str  # key of the held-out score: <metric>_warm and <metric>_final in the summary
    metric_title: str
    metric_meaning: str  # what is counted, after "N held-out problems, decoded greedily: "
    rollouts: RolloutLine
    num_heldout: int  # problems before and after; the first half is scored during the run
    max_new_tokens: int
    mid_sequence: bool  # the summary counts the updates that landed inside a sequence
    made: str  # template of the paragraph that says how it was made
    ensure_warm_start: Callable[[Path, OnProgress], Path]
    write_data: Callable[[Path, int, int], Path]  # path, count, seed
    write_heldout: Callable[[Path, int, int], Path]  # the same for `eval.data`
    heldout: Callable[[int, int], list[Any]]  # count, seed
    messages: Callable[[Any], list[dict[str, Any]]]
    score: Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]  # answers, problems; holds `metric`
    problem_view: Callable[[Any], ProblemView]
    answer_view: Callable[[Any, Any], AnswerView]  # problem, answer
    answer_of: Callable[[Answer], Any] = lambda answer: answer.text  # as the run's evaluator stores it
    answers: Callable[[Path, Sequence[Any]], Sequence[Any]] | None = None  # model, problems; None: one text each
    images: Callable[[Any], tuple[Any, ...]] | None = None  # PIL images of a problem; None: its prompt has none
    model: str = "Qwen3"  # as the report names it
    threads: int = 2  # torch's, of the warm start and of the answers before and after
    also: tuple[str, ...] = ()  # more score keys for the summary
    calls_leave_no_log: bool = False  # its jobs are calls of agent rollouts, which the history doesn't hold
    seen: str = ""  # final scores of earlier runs with the task's own settings

    @property
    def num_followed(self) -> int:
        """How many of the held-out problems are scored during the run: the first half."""
        return self.num_heldout // 2

    def config_path(self) -> Path:
        """The config file of the checkout, or of the installed package."""
        return Path(__file__).parents[1] / "configs" / self.config_file


def load_task(name: str) -> DemoTask:
    """The task with that name; raises ConfigError if there is none."""
    if name not in NAMES:
        raise ConfigError(f"--task: unknown task {name!r}; {did_you_mean(name, list(NAMES))}")
    return importlib.import_module(f"sluice.demo.{name}.task").TASK
