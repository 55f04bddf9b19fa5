"""The policy loss against a float64 reference, values and gradients; strange numbers that do not count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.training.policy.loss import PolicySums, policy_loss
from sluice.pipeline.config.types import PolicyConfig
from tests.policy_reference import Token, reference

NAN, INF = math.nan, math.inf


def run(
    tokens: Sequence[Token], mask: Sequence[bool], options: PolicyConfig, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, float], list[float], PolicySums]:
    logp, proximal, behaviour, advantages = torch.tensor(tokens, dtype=dtype).view(-1, 4).T.contiguous()
    logp.requires_grad_()
    sums = policy_loss(logp, proximal, behaviour, advantages, torch.tensor(mask, dtype=torch.bool), options)
    sums.loss.backward()
    assert logp.grad is not None
    return {name: value.item() for name, value in sums._asdict().items()}, logp.grad.tolist(), sums


# On a grid of eighths no ratio lies within rounding of a threshold.
LOGS = st.integers(-40, 40).map(lambda eighths: eighths / 8)
ADVANTAGES = st.sampled_from([-2.0, -0.3, 0.0, 0.7, 1.5])
TOKENS = st.tuples(LOGS, LOGS, LOGS, ADVANTAGES)
NEAR = st.integers(-8, 8).map(lambda eighths: eighths / 8)  # of one size, or differences lose the small slopes
OPTIONS = st.builds(
    PolicyConfig,
    clip_eps=st.sampled_from([0.1, 0.2, 0.5]),
    clip_eps_high=st.sampled_from([None, 0.28, 3.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    weight_cap=st.sampled_from([1.1, 5.0, 1e9]),
    weight_floor=st.sampled_from([0.0, 0.2, 0.9]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=24), OPTIONS)
def test_values_and_gradients_are_those_of_the_reference(
    drawn: list[tuple[Token, bool]], options: PolicyConfig
) -> None:
    tokens, mask = [token for token, _ in drawn], [on for _, on in drawn]
    wanted, slopes = reference(tokens, mask, options)
    got, gradient, _ = run(tokens, mask, options)
    assert got == pytest.approx(dataclasses.asdict(wanted), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=24), OPTIONS, st.integers(0, 24))
def test_the_parts_of_a_batch_add_up_to_it(drawn: list[tuple[Token, bool]], options: PolicyConfig, cut: int) -> None:
    tokens, mask = [token for token, _ in drawn], [on for _, on in drawn]
    whole, gradient, _ = run(tokens, mask, options)
    left, left_gradient, _ = run(tokens[:cut], mask[:cut], options)
    right, right_gradient, _ = run(tokens[cut:], mask[cut:], options)
    assert {name: left[name] + right[name] for name in whole} == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert left_gradient + right_gradient == pytest.approx(gradient, rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NEAR, NEAR, NEAR, ADVANTAGES), min_size=1, max_size=5), OPTIONS)
def test_gradients_are_finite_differences_of_the_loss(tokens: list[Token], options: PolicyConfig) -> None:
    step, every = 1e-6, [True] * len(tokens)
    _, gradient, _ = run(tokens, every, options)
    for at, (logp, *rest) in enumerate(tokens):
        moved = [[*tokens[:at], (logp + by, *rest), *tokens[at + 1 :]] for by in (step, -step)]
        up, down = (run(some, every, options)[0]["loss"] for some in moved)  # type: ignore[arg-type]
        assert gradient[at] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("advantage", "ratio", "pg", "slope"),
    [
        (1.0, 1.1, -1.1, -1.1),
        (1.0, 1.5, -1.2, 0.0),  # clipped above
        (1.0, 0.5, -0.5, -0.5),  # the clip never makes a bad move cheaper
        (-1.0, 0.5, 0.8, 0.0),  # clipped below
        (-1.0, 2.0, 2.0, 2.0),
        (-1.0, 7.0, 3.0, 0.0),  # dual clip
        (1.0, 7.0, -1.2, 0.0),  # none where A > 0
        (1.0, 0.01, -0.01, -0.01),
        (0.0, 7.0, 0.0, 0.0),
    ],
)
def test_clip_and_dual_clip(advantage: float, ratio: float, pg: float, slope: float) -> None:
    options = PolicyConfig(clip_eps=0.2, dual_clip=3.0)
    got, gradient, _ = run([(math.log(ratio) - 1, -1.0, -1.0, advantage)], [True], options)
    assert (got["loss"], gradient[0]) == pytest.approx((pg, slope))
    assert got["dual_clipped"] == float(advantage < 0 and ratio > 3)
    assert got["clipped"] == float(advantage * (ratio - 1) > 0 and not 0.8 < ratio < 1.2 and not got["dual_clipped"])


def test_cap_and_floor_mask_what_is_beyond_them_and_count_it() -> None:
    weights = (0.19, 0.21, 1.0, 4.9, 5.1)
    tokens = [(-1.0, -1.0, -1.0 - math.log(weight), 1.0) for weight in weights]
    got, gradient, _ = run(tokens, [True] * 5, PolicyConfig())
    assert (got["capped"], got["floored"], got["kept"], got["tokens"]) == (1, 1, 3, 5)
    assert gradient == pytest.approx([0.0, -0.21, -1.0, -4.9, 0.0])
    assert got["loss"] == pytest.approx(-6.11)


def test_no_tokens_at_all() -> None:
    for tokens in ([], [(-1.0, -2.0, -3.0, 1.0)]):
        got, gradient, _ = run(tokens, [False] * len(tokens), PolicyConfig())
        assert set(got.values()) == {0.0}
        assert gradient == [0.0] * len(tokens)


STRANGE = (NAN, INF, -INF, 1e30, -1e30, 200.0, -200.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_what_does_not_count_poisons_nothing(dtype: torch.dtype, dual_clip: float | None) -> None:
    options = PolicyConfig(dual_clip=dual_clip)
    good: Token = (-1.0, -1.1, -1.2, 1.0)
    alone, [slope], _ = run([good], [True], options, dtype)
    bad: list[Token] = [(x, y, z, a) for x in STRANGE for y in STRANGE for z in STRANGE for a in (-1.0, 1.0, NAN, INF)]
    got, gradient, _ = run([good, *bad], [True] + [False] * len(bad), options, dtype)
    assert got == alone
    assert gradient == [slope] + [0.0] * len(bad)


@pytest.mark.parametrize(
    ("token", "key"),
    [
        ((-1.0, -1.0, -INF, 1.0), "capped"),
        ((-1.0, -1.0, -300.0, 1.0), "capped"),
        ((-1.0, -INF, -1.0, -1.0), "floored"),
        ((-1.0, -300.0, -1.0, -1.0), "floored"),
        ((-1.0, NAN, -1.0, 1.0), "floored"),
        ((-1.0, -INF, -INF, 1.0), "floored"),
    ],
)
def test_scores_beyond_all_bounds_are_counted_and_have_no_gradient(token: Token, key: str) -> None:
    got, gradient, _ = run([token], [True], PolicyConfig(), torch.float32)
    assert (got["loss"], got[key], got["kept"], gradient) == (0.0, 1.0, 0.0, [0.0])


def test_a_ratio_beyond_all_bounds_is_clipped_without_nan() -> None:
    far = [(-1.0, -400.0, -400.0, 2.0), (-1.0, -400.0, -400.0, -2.0), (-1.0, -400.0, -400.0, 0.0)]
    got, gradient, _ = run(far, [True] * 3, PolicyConfig(dual_clip=3.0), torch.float32)
    assert (got["loss"], gradient) == (pytest.approx(-2.4 + 6.0), [0.0] * 3)
    assert math.isfinite(got["importance_weight"])
    assert math.isfinite(got["approx_kl"])


def test_a_policy_that_is_no_number_is_not_hidden() -> None:
    """The update must be skipped, not made from the rest."""
    got, gradient, _ = run([(NAN, -1.0, -1.0, 1.0), (-1.0, -1.0, -1.0, 1.0)], [True] * 2, PolicyConfig())
    assert math.isnan(got["loss"])
    assert math.isnan(gradient[0])


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_precision(dtype: torch.dtype, wanted: torch.dtype) -> None:
    _, _, sums = run([(-1.0, -1.5, -1.25, 1.0)], [True], PolicyConfig(), dtype)
    assert sums.loss.dtype == sums.approx_kl.dtype == wanted


def test_no_gradient_reaches_anything_but_logp() -> None:
    logp, proximal, behaviour, advantages = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.1, -1.2, 1.0))
    policy_loss(logp, proximal, behaviour, advantages, torch.tensor([True]), PolicyConfig()).loss.backward()
    assert [part.grad is not None for part in (logp, proximal, behaviour, advantages)] == [True, False, False, False]
