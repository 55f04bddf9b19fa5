"""The demo's definition of the arithmetic task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sluice.demo.answers import AnswerView, ProblemView, shortened
from sluice.demo.arithmetic.data import messages_of, write_jsonl
from sluice.demo.arithmetic.evaluate import accuracy, is_right
from sluice.demo.arithmetic.problems import Problem, problems
from sluice.demo.arithmetic.warm_start import ensure_warm_start
from sluice.demo.tasks import DemoTask, RolloutLine


def _write(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "train", count, seed)


def _write_heldout(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "heldout", count, seed)


def _heldout(count: int, seed: int) -> list[Problem]:
    """The held-out problems; none is ever trained on."""
    return list(problems("heldout", count, seed))


def _score(texts: Sequence[str], chosen: Sequence[Problem]) -> dict[str, float]:
    return {"accuracy": accuracy(texts, chosen)}


def _problem_view(problem: Problem) -> ProblemView:
    return ProblemView(problem.text, str(problem.answer))


def _answer_view(problem: Problem, text: str) -> AnswerView:
    """One line a step; only the number after the last = counts."""
    right = is_right(text, problem)
    steps = shortened(text).split(";")
    return AnswerView(steps, "right" if right else "wrong", "good" if right else "bad")


TASK = DemoTask(
    name="arithmetic",
    title="sums by steps, learnt from rewards",
    config_file="demo-arithmetic.yaml",
    metric="accuracy",
    metric_title="held-out accuracy",
    metric_meaning="the right number at the end; none of these problems is trained on",
    rollouts=RolloutLine(
        "rollout/reward_mean",
        "Reward",
        "sampled training rollouts; the share that is right",
    ),
    num_heldout=300,
    max_new_tokens=96,
    mid_sequence=True,
    made="arithmetic.html.j2",
    ensure_warm_start=lambda cache, on_progress: ensure_warm_start(cache, on_progress=on_progress),
    write_data=_write,
    heldout=_heldout,
    write_heldout=_write_heldout,
    messages=messages_of,
    score=_score,
    problem_view=_problem_view,
    answer_view=_answer_view,
)
