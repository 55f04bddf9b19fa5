"""Advantages within a group: against NumPy, and where there is nothing to compare."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.samples import group_advantages

KINDS = ("group_norm", "group_mean", "rloo", "reinforce_pp", "reward")
REWARDS = st.lists(st.floats(-1e30, 1e30), max_size=12)


@settings(deadline=None)
@given(st.lists(st.integers(-50, 50).map(lambda tenths: tenths / 10), min_size=2, max_size=12))
def test_against_the_formulas(rewards: list[float]) -> None:
    values = np.array(rewards)
    centred = values - values.mean()
    assert group_advantages(rewards, "group_mean") == pytest.approx(centred.tolist(), abs=1e-9)
    assert group_advantages(rewards, "group_norm") == pytest.approx(
        (centred / (values.std() + 1e-6)).tolist(), abs=1e-6
    )
    assert group_advantages(rewards, "reward") == group_advantages(rewards, "reinforce_pp") == rewards
    others = [np.delete(values, at).mean() for at in range(len(values))]
    assert group_advantages(rewards, "rloo") == pytest.approx((values - others).tolist(), abs=1e-9)
    assert group_advantages(rewards, "group_norm", "sample") == pytest.approx(
        (centred / (values.std(ddof=1) + 1e-6)).tolist(), abs=1e-6
    )


@settings(deadline=None)
@given(REWARDS, st.sampled_from(KINDS))
def test_always_finite_numbers(rewards: list[float], kind: str) -> None:
    got = group_advantages(rewards, kind)  # type: ignore[arg-type]
    assert len(got) == len(rewards)
    assert all(math.isfinite(value) for value in got)


@settings(deadline=None)
@given(st.floats(-1e30, 1e30), st.integers(1, 9))
def test_equal_rewards_are_exactly_zero(reward: float, size: int) -> None:
    for kind in ("group_norm", "group_mean", "rloo"):
        assert group_advantages([reward] * size, kind) == [0.0] * size


def test_one_right_of_four() -> None:
    norm = group_advantages([1.0, 0.0, 0.0, 0.0], "group_norm")
    assert norm == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-5)
