"""Advantages of a group: how much better each member did than the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

_EPS = 1e-6


def group_advantages(rewards: Sequence[float], kind: Literal["group_norm", "group_mean", "reward"]) -> list[float]:
    """One number per finite reward: (r - mean) / (std + 1e-6), r - mean, or r itself.

    The standard deviation is that of the population. Equal rewards, as those of a group of one, have no better
    and no worse: 0, exactly.

    >>> group_advantages([1.0, 0.0], "group_mean")
    [0.5, -0.5]
    """
    if kind == "reward" or not rewards:
        return list(rewards)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "group_mean":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + _EPS) for value in centred]
