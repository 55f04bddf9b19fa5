"""The policy losses by name: each against NumPy in float64, written from its formula; your own; and their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.training.policy.loss import aggregation, policy_loss
from sluice.consumers.training.policy.surrogate import SURROGATES, load_surrogate
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import CONVENTIONS, PolicyConfig
from sluice.pipeline.errors import ConfigError


class Token(NamedTuple):
    logp: float
    proximal: float
    behaviour: float
    is_on: bool


Answer = tuple[float, list[Token]]  # advantage, tokens


def named(name: str, **changes: Any) -> PolicyConfig:
    return PolicyConfig(**{"loss": name, **CONVENTIONS[name], "aggregation_tokens": 16, **changes})


def numpy_loss(answers: Sequence[Answer], options: PolicyConfig) -> tuple[float, list[float]]:
    """The loss of a batch and its slope in every logp; from the papers' formulas, one sequence after another."""
    numerators: list[float] = []
    slopes: list[float] = []
    lengths = [sum(token.is_on for token in tokens) for _, tokens in answers]
    alive = sum(length > 0 for length in lengths)
    for (advantage, tokens), length in zip(answers, lengths, strict=True):
        table = np.array([token[:3] for token in tokens], dtype=np.float64).reshape(-1, 3)
        weight = np.exp(table[:, 1] - table[:, 2])
        on = np.array([token.is_on for token in tokens], dtype=bool)
        kept = on & (weight <= options.weight_cap) & (weight >= options.weight_floor)
        values, jacobian = numpy_tokens(table[:, 0] - table[:, 1], table[:, 0], advantage, kept, options)
        share = {
            "token": 1 / max(1, sum(lengths)),
            "sequence": 1 / max(1, length) / max(1, alive),
            "constant": 1 / (max(1, alive) * options.aggregation_tokens),
        }[options.aggregation]
        scale = np.where(kept, weight * share, 0)
        numerators.append(float((values * scale).sum()))
        slopes += (jacobian * scale[:, None]).sum(axis=0).tolist()
    return math.fsum(numerators), slopes


def numpy_tokens(
    log_ratio: np.ndarray, logp: np.ndarray, advantage: float, kept: np.ndarray, options: PolicyConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each token [T]; its slopes in every logp [T, T]."""
    high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
    size = len(log_ratio)
    if options.loss == "cispo":
        factor = -advantage * np.clip(np.exp(log_ratio), 1 - options.clip_eps, 1 + high)
        return factor * logp, np.diag(factor)
    spread = np.eye(size)
    if options.loss == "gspo":
        spread = np.tile(kept / max(1, kept.sum()), (size, 1))
    ratio = np.exp(spread @ log_ratio)
    plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 1 - options.clip_eps, 1 + high)
    values, moves = np.maximum(plain, clipped), plain >= clipped
    if options.dual_clip is not None and advantage < 0:
        moves &= values <= -advantage * options.dual_clip
        values = np.minimum(values, -advantage * options.dual_clip)
    return values, np.where(moves, plain, 0)[:, None] * spread


def torch_loss(
    answers: Sequence[Answer], options: PolicyConfig, parts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> tuple[float, list[float]]:
    """The same with the product's code; the answers in these rows, each row a micro-batch."""
    counts = [sum(token.is_on for token in tokens) for _, tokens in answers]
    divisor, shares = aggregation(counts, options)
    total, slopes = 0.0, dict[int, list[float]]()
    for part in parts:
        if not sum(len(answers[at][1]) for at in part):
            continue
        table = torch.tensor([token[:3] for at in part for token in answers[at][1]], dtype=dtype)[None]
        mask = torch.tensor([token.is_on for at in part for token in answers[at][1]])[None]
        owner = torch.tensor([at for at in part for _ in answers[at][1]])[None]
        advantages = torch.tensor([advantage for advantage, _ in answers], dtype=dtype)[owner]
        logp = table[..., 0].clone().requires_grad_()
        sums = policy_loss(
            logp,
            table[..., 1],
            table[..., 2],
            advantages,
            mask,
            options,
            shares=None if shares is None else shares.to(dtype)[owner],
            sequences=owner,
            num_sequences=len(answers),
        )
        (sums.loss / divisor).backward()
        total += sums.loss.item() / divisor
        assert logp.grad is not None
        for at in part:
            slopes[at] = logp.grad[owner == at].tolist()
    return total, [slope for at in range(len(answers)) for slope in slopes.get(at, [])]


# On a grid of eighths no ratio lies within rounding of a threshold.
LOGS = st.integers(-40, 0).map(lambda eighths: eighths / 8)
TOKENS = st.builds(Token, LOGS, LOGS, LOGS, st.booleans())
ANSWERS = st.lists(
    st.tuples(st.sampled_from([-2.0, -0.3, 0.0, 0.7, 1.5]), st.lists(TOKENS, max_size=6)), min_size=1, max_size=6
)
BOUNDS = st.sampled_from([{}, {"weight_cap": 1.1, "weight_floor": 0.9}, {"weight_cap": 1e9, "weight_floor": 0.0}])
NAMES = st.sampled_from(sorted(SURROGATES))
MEANS = st.sampled_from([{}, {"aggregation": "token"}, {"aggregation": "sequence"}, {"aggregation": "constant"}])


@settings(deadline=None, max_examples=200)
@given(ANSWERS, NAMES, BOUNDS, MEANS, st.sampled_from([None, 1.5, 3.0]))
def test_values_and_gradients_are_those_of_the_formulas(
    answers: list[Answer], name: str, bounds: dict[str, Any], means: dict[str, Any], dual: float | None
) -> None:
    options = named(name, **bounds, **means, dual_clip=None if name == "cispo" else dual)
    wanted, slopes = numpy_loss(answers, options)
    got, gradient = torch_loss(answers, options, [list(range(len(answers)))])
    assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(ANSWERS, NAMES, MEANS, st.randoms(use_true_random=False))
def test_micro_batches_and_rows_change_nothing(
    answers: list[Answer], name: str, means: dict[str, Any], drawn: Any
) -> None:
    options = named(name, **means)
    order = list(range(len(answers)))
    drawn.shuffle(order)
    cut = drawn.randrange(len(order) + 1)
    whole, gradient = torch_loss(answers, options, [list(range(len(answers)))])
    for parts in ([order[:cut], order[cut:]], [[at] for at in order]):
        got, slopes = torch_loss(answers, options, parts)
        assert got == pytest.approx(whole, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(slopes, gradient, rtol=1e-9, atol=1e-12)


STRANGE = (math.nan, math.inf, -math.inf, 1e30, -1e30, 200.0, -200.0)


@pytest.mark.parametrize("name", sorted(SURROGATES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_excluded_has_no_gradient_and_changes_nothing(name: str, dtype: torch.dtype) -> None:
    options = named(name)
    good = [Token(-1.0, -1.1, -1.2, True), Token(-0.5, -0.4, -0.4, True)]
    off = [Token(x, y, z, False) for x in STRANGE for y in STRANGE for z in STRANGE]
    wanted, slopes = torch_loss([(1.5, good)], options, [[0]], dtype)
    got, gradient = torch_loss([(1.5, [*good, *off])], options, [[0]], dtype)
    assert got == pytest.approx(wanted, rel=1e-6)
    assert gradient[:2] == pytest.approx(slopes, rel=1e-6)
    assert gradient[2:] == [0.0] * len(off)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_tokens_beyond_cap_and_floor_count_in_the_mean_alone(name: str) -> None:
    good = Token(-1.0, -1.1, -1.2, True)
    beyond = [Token(-1.0, -math.inf, -1.0, True), Token(-1.0, -1.0, -math.inf, True), Token(-1.0, math.nan, -1.0, True)]
    options = named(name)
    wanted, slopes = torch_loss([(1.5, [good])], options, [[0]], torch.float32)
    got, gradient = torch_loss([(1.5, [good, *beyond])], options, [[0]], torch.float32)
    diluted = 1.0 if options.aggregation == "constant" else 4.0
    assert got == pytest.approx(wanted / diluted)
    assert gradient == pytest.approx([slopes[0] / diluted, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", sorted(SURROGATES))
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_a_ratio_beyond_all_bounds(name: str, log_ratio: float) -> None:
    """Clipped where A and the ratio agree: finite, and CISPO alone keeps a gradient."""
    options = named(name)
    advantage = math.copysign(2.0, log_ratio)
    got, gradient = torch_loss([(advantage, [Token(-500.0, -500.0 - log_ratio, -500.0 - log_ratio, True)])], options,
                               [[0]], torch.float32)  # fmt: skip
    assert math.isfinite(got)
    assert math.isfinite(gradient[0])
    assert (gradient[0] != 0) == (name == "cispo" and log_ratio > 0)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_equal_rewards_train_nothing(name: str) -> None:
    got, gradient = torch_loss([(0.0, [Token(-1.0, -300.0, -300.0, True), Token(-2.0, -1.0, -1.0, True)])],
                               named(name), [[0]], torch.float32)  # fmt: skip
    assert (got, gradient) == (0.0, [0.0, 0.0])


def test_no_sequence_at_all() -> None:
    for name in SURROGATES:
        assert torch_loss([(1.0, [Token(-1.0, -1.0, -1.0, False)])], named(name), [[0]]) == (0.0, [0.0])


def test_every_name_has_its_convention_and_says_its_source() -> None:
    assert SURROGATES.keys() == CONVENTIONS.keys() - {"dpo"}  # dpo.py: a loss of pairs
    for name, surrogate in SURROGATES.items():
        assert surrogate is getattr(__import__(surrogate.__module__, fromlist=[name]), name)
        assert any(f"{year}" in (surrogate.__doc__ or "") for year in range(2017, 2026)), name


ON = ["policy.enabled=true", "producer.group_size=4", "producer.samples_per_version=8"]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([], ("token", "group_norm", 0.2, None, 256)),
        (["policy.loss=grpo"], ("sequence", "group_norm", 0.2, None, 256)),
        (["policy.loss=dapo"], ("token", "group_norm", 0.2, 0.28, 256)),
        (["policy.loss=gspo"], ("sequence", "group_norm", 3e-4, 4e-4, 256)),
        (["policy.loss=gspo", "policy.clip_eps=0.01"], ("sequence", "group_norm", 0.01, 4e-4, 256)),
        (["policy.loss=dapo", "policy.clip_eps_high=null"], ("token", "group_norm", 0.2, None, 256)),
        (["policy.loss=cispo"], ("token", "group_norm", 1.0, 4.0, 256)),
        (["policy.loss=dr_grpo", "sampling.max_new_tokens=99"], ("constant", "group_mean", 0.2, None, 99)),
        (["policy.loss=dr_grpo", "policy.aggregation=token"], ("token", "group_mean", 0.2, None, 256)),
        (["policy.loss=dr_grpo", "policy.aggregation_tokens=7"], ("constant", "group_mean", 0.2, None, 7)),
        (["policy.loss=my.losses:fn"], ("token", "group_norm", 0.2, None, 256)),
    ],
)
def test_a_name_sets_what_is_not_written_out(changes: list[str], wanted: tuple[Any, ...]) -> None:
    found = load_config(None, [*ON, *changes], {}).policy
    assert (found.aggregation, found.advantage, found.clip_eps, found.clip_eps_high, found.aggregation_tokens) == wanted


OWN = """
import torch
from sluice.consumers.training.policy.surrogate import Losses

def good(tokens, options):
    ratio = (tokens.logp - tokens.proximal).exp()
    return -tokens.advantages * ratio

def clipped(tokens, options):
    ratio = (tokens.logp - tokens.proximal).exp()
    clipped = ratio > 1 + options.clip_eps
    return Losses(-tokens.advantages * ratio.clamp(max=1 + options.clip_eps), clipped)

def shares(tokens, options):
    losses, clipped, _ = clipped_of(tokens, options)
    return losses, clipped.float()

def twice(tokens, options):
    losses, clipped, _ = clipped_of(tokens, options)
    return losses, clipped, clipped.long()

clipped_of = clipped

def scalar(tokens, options):
    return tokens.logp.sum()

def text(tokens, options):
    return "loss"

def detached(tokens, options):
    return tokens.logp.detach()

def flat(tokens, options):
    return tokens.logp * 0

def infinite(tokens, options):
    return tokens.logp / 0

def broken(tokens, options):
    raise ZeroDivisionError("in here")

def lonely(tokens):
    return tokens.logp

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "my_losses.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("name", ["good", "clipped"])
def test_your_own_is_used_with_weights_and_mean(own: Path, name: str) -> None:
    options = PolicyConfig(loss=f"{own}:{name}", aggregation="sequence")
    answers = [(1.0, [Token(-1.0, -1.1, -1.3, True)]), (-1.0, [Token(-2.0, -2.0, -2.0, True)] * 3)]
    got, gradient = torch_loss(answers, options, [[0, 1]])
    first = math.exp(0.1) * math.exp(0.2)
    assert got == pytest.approx((-first + 1) / 2)
    assert gradient == pytest.approx([-first / 2, *[1 / 6] * 3])


def test_strange_numbers_outside_the_answer_reach_no_gradient_of_your_own(own: Path) -> None:
    options = PolicyConfig(loss=f"{own}:good")
    far = [Token(-1.0, -math.inf, -1.0, True), Token(200.0, -math.inf, math.nan, True), Token(math.nan, -1, -1, False)]
    got, gradient = torch_loss([(1.0, [Token(-1.0, -1.0, -1.0, True), *far])], options, [[0]], torch.float32)
    assert (got, gradient) == (pytest.approx(-1 / 3), pytest.approx([-1 / 3, 0, 0, 0]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scalar", "losses is (); return one value per token, (1, 7)"),
        ("text", "returned a str"),
        ("shares", "clipped is torch.float32; return a bool tensor, such as ratio > 1.2"),
        ("twice", "dual_clipped is torch.int64; return a bool tensor"),
        ("detached", "losses without a gradient"),
        ("flat", "it must be finite, and not all 0"),
        ("infinite", "every loss must be a finite number"),
        ("broken", "raised ZeroDivisionError: in here"),
        ("lonely", "can't be called as loss(tokens, options)"),
        ("number", "is not a function"),
        ("goood", "did you mean 'good'?"),
    ],
)
def test_your_own_is_tried_before_it_trains(own: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_surrogate(PolicyConfig(loss=f"{own}:{name}"))
    assert words in str(caught.value)
    assert str(caught.value).startswith("policy.loss: ")
