"""The live versions of a run: each was published from the one before it.

    published     0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ 4          a trainer killed here had its last checkpoint at version 2
    goes on                └───────────▶ 5 ─▶ 6    so 3 and 4 are lost
    live          0    1    2            5    6

A token's proximal logprob is the one under the live version whose parent sampled it; tokens of a lost version have
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Versions = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Line:
    """The newest live versions, rising, without gaps between parent and child; at least one."""

    numbers: Sequence[int]

    @classmethod
    def consecutive(cls, newest: int) -> Line:
        """A run that never went back, up to this version."""
        return cls(range(newest + 1))

    @property
    def newest(self) -> int:
        return self.numbers[-1]

    @property
    def parent(self) -> int:
        """Of the newest; -1 if unknown, or if there is none."""
        return self.numbers[-2] if len(self.numbers) > 1 else -1

    def holds(self, versions: Versions) -> NDArray[np.bool_]:
        """Which of these are live; same shape."""
        return np.isin(versions, self.numbers)

    def successors(self, versions: Versions) -> NDArray[np.int64]:
        """The live version published from each; -1 for the newest, lost and forgotten ones. Same shape."""
        numbers = np.asarray(self.numbers, dtype=np.int64)
        after = np.append(numbers[1:], -1)
        return np.where(self.holds(versions), after[np.searchsorted(numbers[:-1], versions)], -1)

    def lags(self, versions: Versions) -> NDArray[np.int64]:
        """How many live versions are newer than each; same shape."""
        numbers = np.asarray(self.numbers, dtype=np.int64)
        forgotten = np.maximum(numbers[0] - versions, 0)
        return len(numbers) - np.searchsorted(numbers, versions, side="right") + np.maximum(forgotten - 1, 0)

    def up_to(self, version: int) -> Line:
        """As it was when `version` was the newest."""
        return Line([number for number in self.numbers if number <= version] or [version])

    def newest_few(self, count: int) -> Sequence[int]:
        """The newest `count`, or all."""
        return self.numbers[-count:]
