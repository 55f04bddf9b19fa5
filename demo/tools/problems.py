"""Problems of one or two operations on numbers too large for a tiny model to compute by itself: `(812-57)*3`.

- Every intermediate result is an integer, 0 to 9999, so the calculator's answer is one or two tokens.
- Operations and numbers depend on the seed only.
- Train and held-out problems never overlap: a checksum of the problem's text selects the split.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

TOOL_OF = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
"""The tool of an operation, which takes arguments `a` and `b`."""

_LARGEST = 9999
_HELDOUT_SHARE = 5  # every fifth checksum
_SHAPES = (
    *((operation, 0) for operation in ("+", "-", "*", "/")),
    *((operations, 0) for operations in ("*+", "*-", "/+", "+*", "-*")),
    *((operations, 1) for operations in ("+*", "-*", "+/", "*+", "*-")),
)
"""The operations from left to right, and which of them is done first."""


@dataclass(frozen=True)
class Step:
    """One call of the calculator and its result."""

    tool: str
    a: int
    b: int
    result: int


@dataclass(frozen=True)
class Problem:
    """`numbers` with `operations` between them; operation `first` is done first."""

    numbers: tuple[int, ...]
    operations: str
    first: int

    @property
    def brackets(self) -> bool:
        """Whether the text needs brackets."""
        if len(self.operations) == 1:
            return False
        done, other = self.operations[self.first], self.operations[1 - self.first]
        return done in "+-" and other in "*/"

    @property
    def text(self) -> str:
        """`(812-57)*3`."""
        numbers = list(map(str, self.numbers))
        if self.brackets:
            numbers[self.first] = "(" + numbers[self.first]
            numbers[self.first + 1] += ")"
        return numbers[0] + "".join(map("".join, zip(self.operations, numbers[1:], strict=True)))

    @property
    def steps(self) -> list[Step] | None:
        """The calls in order; None if an intermediate result is fractional, negative or too large."""
        return _steps(self, self.first)

    @property
    def wrong_steps(self) -> list[Step] | None:
        """The calls in the other order, if there is one."""
        return _steps(self, 1 - self.first) if len(self.operations) == 2 else None

    @property
    def answer(self) -> int:
        """The last result."""
        steps = self.steps
        if not steps:
            raise ValueError(f"{self.text} has no answer among 0..{_LARGEST}")
        return steps[-1].result


def split_of(problem: Problem) -> Split:
    """The split of a problem, independent of the seed."""
    return "train" if zlib.crc32(problem.text.encode()) % _HELDOUT_SHARE else "heldout"


def problems(split: Split, count: int, seed: int) -> Iterator[Problem]:
    """`count` problems of a split, each from its own generator, so that a longer list begins with the shorter."""
    for index in range(count):
        rng = random.Random(f"{seed} {split} {index}")
        operations, first = rng.choice(_SHAPES)
        while (problem := _draw(rng, operations, first)).steps is None or split_of(problem) != split:
            continue
        yield problem


def _draw(rng: random.Random, operations: str, first: int) -> Problem:
    numbers = [rng.randint(*rng.choice(((2, 99), (11, 999)))) for _ in range(len(operations) + 1)]
    place = operations.find("/")
    if place >= 0:  # makes the division exact
        numbers[place + 1] = rng.randint(2, 40)
        numbers[place] = numbers[place + 1] * rng.randint(2, 999 // numbers[place + 1])
    return Problem(tuple(numbers), operations, first)


def _steps(problem: Problem, first: int) -> list[Step] | None:
    numbers, operations, steps = list(problem.numbers), list(problem.operations), list[Step]()
    for place in (first, 0)[: len(operations)]:
        a, b = numbers[place : place + 2]
        result = _result(operations.pop(place), a, b)
        if result is None:
            return None
        steps.append(Step(TOOL_OF[problem.operations[place if not steps else 1 - first]], a, b, result))
        numbers[place : place + 2] = [result]
    return steps


def _result(operation: str, a: int, b: int) -> int | None:
    if operation == "/":
        return a // b if b and a % b == 0 else None
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return result if 0 <= result <= _LARGEST else None
