"""Estimates from answers to held-out prompts, each with its 95 % confidence interval.

The unit is the prompt: its answers are not independent of one another. Prompts are a sample of those one could ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_RESAMPLES = 2000
_AT_ONCE = 1 << 22  # drawn indices in memory


class Interval(NamedTuple):
    """A mean over prompts, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Probability that at least one of `k` answers is right, unbiased, from `num_answers` >= k of them.

    1 - C(n - c, k) / C(n, k), as a product: Chen et al., 2021 (Evaluating Large Language Models Trained on Code).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(2, 0, 1)
    (0.25, 1.0, 0.0)
    """
    if not 1 <= k <= num_answers or not 0 <= num_right <= num_answers:
        raise ValueError(f"pass@{k} of {num_right} right ones among {num_answers} answers")
    if num_answers - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / at for at in range(num_answers - num_right + 1, num_answers + 1))


def interval(values: Sequence[float], seed: int) -> Interval:
    """The mean of one value per prompt (at least one). Shares of yes and no: Wilson's; all else: the bootstrap's."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(int(sum(values)), len(values))
    return bootstrap(values, seed)


def wilson(successes: int, total: int) -> Interval:
    """The score interval of a share: Wilson, 1927 (Probable inference, the law of succession, and statistical
    inference). Unlike the normal one it has a width where all or none succeeded.

    >>> [round(value, 4) for value in wilson(10, 10)]
    [1.0, 0.7225, 1.0]
    """
    share = successes / total
    below = 1 + _Z * _Z / total
    centre = (share + _Z * _Z / (2 * total)) / below
    half = _Z / below * math.sqrt(share * (1 - share) / total + _Z * _Z / (4 * total * total))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == total else min(1.0, centre + half)
    return Interval(share, low, high)


def bootstrap(values: Sequence[float], seed: int) -> Interval:
    """The percentile interval of a mean, from resampled prompts: Efron and Tibshirani, 1993 (An Introduction to the
    Bootstrap, ch. 13). The same values and seed give the same interval.
    """
    found = np.asarray(values, dtype=np.float64)
    draw, means = np.random.default_rng(seed), list[np.ndarray]()
    left, rows = _RESAMPLES, max(1, _AT_ONCE // len(found))
    while left > 0:
        count = min(left, rows)
        means.append(found[draw.integers(0, len(found), size=(count, len(found)))].mean(axis=1))
        left -= count
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(found.mean()), float(low), float(high))
