"""Sums with a chain of steps, the problems of the arithmetic task.

- A problem is a two-digit number and some single digits to add or subtract: `47+8-5+9`.
- Its answer is one step per term, `47+8=55;55-5=50;50+9=59`; the number after the last `=` is what counts.
- Every running total has at most two digits. Steps and terms depend on the seed only.
- Train and held-out problems never overlap: a checksum of the problem's text selects the split.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

NUM_TERMS = (6, 10)
"""Fewest and most terms after the first number."""
ANSWER_PATTERN = r"=([0-9]+)$"
"""Finds the answer at the end of what the model wrote."""

_LARGEST_TOTAL = 99
_HELDOUT_SHARE = 5  # every fifth checksum


@dataclass(frozen=True)
class Problem:
    """`first`, then `terms` that are added (positive) or subtracted (negative)."""

    first: int
    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """`47+8-5`."""
        return str(self.first) + "".join(f"{term:+d}" for term in self.terms)

    @property
    def answer(self) -> int:
        """The last total."""
        return self.first + sum(self.terms)

    @property
    def worked(self) -> str:
        """Every step, `47+8=55;55-5=50`."""
        steps, total = [], self.first
        for term in self.terms:
            steps.append(f"{total}{term:+d}={total + term}")
            total += term
        return ";".join(steps)


def split_of(problem: Problem) -> Split:
    """The split of a problem, independent of the seed."""
    return "train" if zlib.crc32(problem.text.encode()) % _HELDOUT_SHARE else "heldout"


def problems(split: Split, count: int, seed: int) -> Iterator[Problem]:
    """`count` problems of a split, each from its own generator, so that a longer list begins with the shorter."""
    for index in range(count):
        rng = random.Random(f"{seed} {split} {index}")
        while split_of(problem := _draw(rng)) != split:
            continue
        yield problem


def _draw(rng: random.Random) -> Problem:
    first = total = rng.randint(10, 89)
    terms: list[int] = []
    for _ in range(rng.randint(*NUM_TERMS)):
        fits = [term for term in range(-9, 10) if term and 0 <= total + term <= _LARGEST_TOTAL]
        terms.append(rng.choice(fits))
        total += terms[-1]
    return Problem(first, tuple(terms))
