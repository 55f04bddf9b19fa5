"""When two passes agree: faults show through noise, and noise is no fault."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.weights.agreement import Agreement, Gaps, largest

FP32, BF16 = 2.0**-23, 2.0**-7
DENSE, ROUTED = SimpleNamespace(num_experts=None), SimpleNamespace(num_local_experts=8)


def gaps(*sequences: list[float]) -> list[Gaps]:
    return [np.array(each) for each in sequences]


def agreement(noise: float = 0.0, *, epsilon: float = FP32, config: object = DENSE) -> Agreement:
    return Agreement.of(gaps([noise] * 20), gaps([-8.0] * 20), epsilon=epsilon, config=config)


def test_float32_is_held_to_its_tolerance_token_by_token() -> None:
    rule = agreement(1e-5)
    assert rule.tolerance == 1e-4
    assert rule.holds(gaps([9e-5] * 100, [0.0]))
    assert not rule.holds(gaps([0.0] * 99 + [2e-4]))


@pytest.mark.parametrize(("epsilon", "ceiling"), [(FP32, 1e-3), (BF16, 1.0)])
@given(noise=st.floats(0, 100))
def test_noise_raises_the_tolerance_up_to_a_ceiling(epsilon: float, ceiling: float, noise: float) -> None:
    rule = agreement(noise, epsilon=epsilon)
    assert rule.tolerance <= ceiling
    assert rule.tolerance >= min(4 * noise, ceiling)


def test_half_precision_may_round_a_logprob_and_no_more() -> None:
    rule = agreement(epsilon=BF16)
    assert rule.tolerance == pytest.approx(2 * BF16 * 8)
    assert rule.holds(gaps([0.1] * 99 + [0.3]))
    assert not rule.holds(gaps([0.1] * 80 + [0.3] * 20))


@pytest.mark.parametrize("epsilon", [FP32, BF16])
def test_a_tie_between_experts_moves_one_token_and_a_fault_a_whole_sequence(epsilon: float) -> None:
    routed, dense = agreement(epsilon=epsilon, config=ROUTED), agreement(config=DENSE)
    flipped = gaps([0.0] * 99 + [3.0], [0.0] * 50)
    assert routed.holds(flipped)
    assert not dense.holds(flipped)
    assert not routed.holds(gaps([0.0] * 1000, [3.0] * 5))
    assert not routed.holds(gaps([0.0] * 40 + [3.0] * 20))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_never_agrees(wrong: float) -> None:
    assert not agreement(epsilon=BF16).holds(gaps([wrong] * 8))
    assert not agreement(np.nan).holds(gaps([0.0] * 8 + [wrong]))
    assert not largest(gaps([0.0], [wrong])) < np.inf


def test_nothing_to_compare_agrees() -> None:
    assert agreement().holds([])
    assert largest([]) == 0.0
