"""Accuracy of answers, read by the same rule as the reward."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.consumers.tasks.exact_answer import extract, read_answer
from sluice.demo.arithmetic.data import truth_of
from sluice.demo.arithmetic.problems import Problem


def is_right(text: str, problem: Problem) -> bool:
    """Whether the text ends with the answer."""
    answer = read_answer(truth_of(problem), problem.text)
    return extract(text, answer.pattern) == answer.text


def accuracy(texts: Sequence[str], problems: Sequence[Problem]) -> float:
    """Share of right answers, 0..1; raises ValueError if the two lists differ in length."""
    right = [is_right(text, problem) for text, problem in zip(texts, problems, strict=True)]
    return sum(right) / len(right) if right else 0.0
