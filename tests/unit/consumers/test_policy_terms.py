"""What joins the policy loss in a step: batch-normalised advantages, entropy, engine mismatch, the means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.consumers.training import row_logits
from sluice.consumers.training.policy.loss import batch_normalised, policy_loss
from sluice.consumers.training.policy.proximal import fill, plan
from sluice.consumers.training.row_logits import RowLogits
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import CONVENTIONS, PolicyConfig
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step

NO_CLIPPING = 1e9
SHAPES: list[dict[str, Any]] = [{}, {"row_tokens": 1, "micro_batch_tokens": 1}]
LENGTHS = (9, 21, 14, 30)
REWARDS = (1.5, -0.5, 0.25, 0.0)
VERSION = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def logits_of(model: Any, sample: TrainingSample) -> torch.Tensor:
    return model(input_ids=torch.tensor([list(sample.token_ids)])).logits[0, :-1] / sample.temperature


def logprobs_of(model: Any, sample: TrainingSample) -> torch.Tensor:
    """Of each token after the first, from one plain pass; float64 [T - 1], with gradient."""
    ids = torch.tensor(list(sample.token_ids))
    return logits_of(model, sample).double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def told(name: str, length: int, advantage: float, behaviour: list[float], **changes: Any) -> TrainingSample:
    """The first two tokens are prompt; sampled by version 6, the trainer's own, where nothing else is said."""
    fields: dict[str, Any] = {
        "weights": FloatArray([0.0] * length),
        "logprobs": FloatArray([0.0, *behaviour]),
        "proximal_logprobs": FloatArray([0.0, *behaviour]),
        "versions": Runs.of([-1] * 2 + [VERSION] * (length - 2)),
        "response_mask": Runs.of([0] * 2 + [1] * (length - 2)),
        "advantage": advantage,
        "reward": advantage,
    }
    return replace(random_sample(name, length), **{**fields, **changes})


def on_policy(step: TrainStep, **changes: Any) -> list[TrainingSample]:
    found = []
    for at, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        behaviour = logprobs_of(step.model, replace(random_sample(str(at), length), **changes)).tolist()
        found.append(told(str(at), length, reward, behaviour, **changes))
    return found


def run(step: TrainStep, samples: list[TrainingSample]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The record, and the gradient that the optimiser was given."""
    seen: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        named = step.model.named_parameters()
        seen.update({name: value.grad.clone() for name, value in named if value.grad is not None})

    handle = step.optimizer.register_step_pre_hook(look)
    record = step.run(samples, 1, version=VERSION)
    handle.remove()
    return record, seen


def gradient_of(step: TrainStep, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    step.model.zero_grad()
    loss.backward()
    found = {name: value.grad.clone() for name, value in step.model.named_parameters() if value.grad is not None}
    step.model.zero_grad()
    return found


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=2e-3, atol=1e-5)


def trainer(source: Path, policy: PolicyConfig, **shape: Any) -> TrainStep:
    return train_step(source, policy=policy, learning_rate=0.0, max_grad_norm=NO_CLIPPING, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_the_mean_of_a_batch(source: Path, shape: dict[str, Any], name: str) -> None:
    """On-policy the gradient is that of -A·logp, over the name's own mean, however the samples are packed."""
    step = trainer(source, PolicyConfig(**{**CONVENTIONS[name], "enabled": True, "loss": name}), **shape)
    samples = on_policy(step)
    silent = replace(samples[0], response_mask=Runs.of([0] * LENGTHS[0]), advantage=5.0)  # counts nowhere
    parts = []
    for sample in samples:
        answer = -(sample.advantage or 0.0) * logprobs_of(step.model, sample)[1:]
        parts.append(answer.sum() / 256 if name == "dr_grpo" else answer.mean())
    wanted = gradient_of(step, torch.stack(parts).mean())
    record, got = run(step, [*samples, silent])
    assert_close(got, wanted)
    sums = [-reward * (length - 2) / 256 for length, reward in zip(LENGTHS, REWARDS, strict=True)]
    loss = np.mean(sums) if name == "dr_grpo" else -np.mean(REWARDS)
    assert record["policy/loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_advantages_over_the_batch_of_a_step(source: Path, shape: dict[str, Any], std: Any) -> None:
    step = trainer(source, PolicyConfig(enabled=True, advantage="reinforce_pp", advantage_std=std), **shape)
    samples = [replace(one, group_rewards=len(REWARDS)) for one in on_policy(step)]
    silent = replace(samples[0], response_mask=Runs.of([0] * LENGTHS[0]), advantage=50.0)
    rewards = np.array(REWARDS)
    normal = (rewards - rewards.mean()) / (rewards.std(ddof=int(std == "sample")) + 1e-6)
    parts = [-value * logprobs_of(step.model, one)[1:] for value, one in zip(normal, samples, strict=True)]
    wanted = gradient_of(step, torch.cat(parts).mean())
    _, got = run(step, [*samples, silent])
    assert_close(got, wanted)
    assert [one.advantage for one in samples] == list(REWARDS)  # what is stored is the reward


def test_a_forked_rollout_counts_once_and_the_tasks_own_advantage_stays() -> None:
    one = replace(told("a", 9, 3.0, [-1.0] * 8), group_id="g", index=0, group_rewards=2)
    parts = [one, replace(one, seq_id="b"), replace(one, seq_id="c")]
    other = replace(one, seq_id="d", index=1, advantage=1.0)
    elsewhere = replace(one, seq_id="e", group_id="h", advantage=2.0)
    own = replace(one, seq_id="f", group_id="i", group_rewards=0, advantage=40.0)
    unstamped = [replace(other, seq_id=name, index=-1, advantage=2.0) for name in "xy"]
    options = PolicyConfig(enabled=True, advantage="reinforce_pp")
    found = [sample.advantage for sample in batch_normalised([*parts, other, elsewhere, own, *unstamped], options)]
    high = 1 / (math.sqrt(2 / 5) + 1e-6)  # 3, 1, 2, 2, 2
    assert found == pytest.approx([high, high, high, -high, 0.0, 40.0, 0.0, 0.0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_bonus(
    source: Path, shape: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_logits, "_AT_ONCE", 7 * 263)  # several chunks
    step = trainer(source, PolicyConfig(enabled=True, entropy_coef=0.3, aggregation="sequence"), **shape)
    samples = on_policy(step, temperature=temperature)
    policy, entropy = [], []
    for sample in samples:
        logprobs = logits_of(step.model, sample).double().log_softmax(-1)[1:]
        entropy.append(-(logprobs.exp() * logprobs).sum(-1))
        policy.append(-(sample.advantage or 0.0) * logprobs_of(step.model, sample)[1:].mean())
    wanted = gradient_of(step, torch.stack(policy).mean() - 0.3 * torch.cat(entropy).mean())
    record, got = run(step, samples)
    assert_close(got, wanted)
    assert record["policy/entropy"] == pytest.approx(torch.cat(entropy).mean().item(), rel=1e-4)


def test_entropies_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(23, 40, generator=drawn, dtype=torch.float64)).requires_grad_()
    with torch.no_grad():
        logits[3, 5:] = -math.inf
        logits[4] = 1e4 * logits[4]
    temperatures = torch.linspace(0.5, 2, 23, dtype=torch.float64)
    scaled = logits.detach().numpy() / temperatures.numpy()[:, None]
    chances = np.exp(scaled - scaled.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    wanted = -(chances * np.log(np.where(chances > 0, chances, 1))).sum(1)
    for most in (40, 41 * 7, 1 << 25):
        monkeypatch.setattr(row_logits, "_AT_ONCE", most)
        rows = RowLogits(torch.cat([logits, logits[:1]])[None])  # nothing follows the last position
        on = torch.ones(1, 23, dtype=torch.bool)
        _, got = rows.scores(on, torch.arange(23), temperatures, entropies=True)
        assert got is not None
        assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)
        [slope] = torch.autograd.grad(got.sum(), logits)
        assert slope.isfinite().all()
    nowhere = torch.zeros(1, 22, dtype=torch.bool)
    nothing = RowLogits(logits[None]).scores(nowhere, torch.arange(0), None, entropies=True)
    assert [None if part is None else part.shape for part in nothing] == [(0,), (0,)]


MISMATCH = [
    ("truncate", "token", 1.02),
    ("truncate", "sequence", 1.05),
    ("mask", "token", 1.02),
    ("mask", "sequence", 1.05),
    ("mask", "token", 100.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("how", "level", "cap"), MISMATCH)
def test_decoding_in_bf16_is_corrected_as_the_formula_says(
    source: Path,
    shape: dict[str, Any],
    how: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
    cap: float,
) -> None:
    """Tokens of this version, of the one before with the engine's score under this one, and of an older version."""
    policy = PolicyConfig(enabled=True, mismatch=how, mismatch_level=level, mismatch_cap=cap)
    step = trainer(source, policy, **shape)
    engine = train_step(source).model.to(torch.bfloat16)
    samples: list[TrainingSample] = []
    parts, cut, gaps = [], 0, []
    total = sum(length - 2 for length in LENGTHS)
    for at, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        plain = random_sample(str(at), length)
        scores = np.array(logprobs_of(engine, plain).tolist(), dtype=np.float64)
        lag = np.arange(length) % 3  # 0: v, 1: v - 1, 2: v - 2
        lag[:2] = 0
        moved = np.where(lag[1:] > 0, 0.1, 0.0)  # what was sampled by an older version has another logprob there
        versions = np.where(np.arange(length) < 2, -1, VERSION - lag)
        sample = told(
            str(at), length, reward, (scores - moved).tolist(),
            proximal_logprobs=FloatArray([0.0, *scores.tolist()]),
            versions=Runs.of(versions.tolist()),
            proximal_versions=Runs.of(np.where((versions >= 0) & (lag > 0), versions + 1, -1).tolist()),
        )  # fmt: skip
        samples.append(sample)
        logp = logprobs_of(step.model, plain)[1:]
        now, known = logp.detach().numpy(), lag[2:] < 2
        gap = np.where(known, now - scores[1:], 0.0)
        m = np.exp(gap.sum() + 0 * gap) if level == "sequence" else np.exp(gap)
        kept = (m <= cap) & (m >= 1 / cap) if how == "mask" else m > 0
        cut += int((~((m <= cap) & (m >= (1 / cap if how == "mask" else 0)))).sum())
        gaps += gap[known].tolist()
        ratio = torch.where(
            torch.from_numpy(known), (logp - logp.detach()).exp(), (logp - torch.from_numpy(scores[1:])).exp()
        )
        # r stays inside the clip where m is not measured: bf16 differs by less than 0.2
        factor = np.where(kept, np.minimum(m, cap) * np.exp(moved[1:]), 0.0)
        parts.append(-reward * ratio * torch.from_numpy(factor))
    wanted = gradient_of(step, torch.cat(parts).sum() / total)
    record, got = run(step, samples)
    assert max(abs(gap) for gap in gaps) > 1e-3  # bf16 is another policy
    assert record["policy/mismatch_tokens"] == cut
    assert cut > 0 or cap == 100
    if level == "token":
        assert record["policy/mismatch_weight"] == pytest.approx(np.exp(gaps).mean(), rel=1e-4)
    assert record["policy/mismatch_unmeasured_tokens"] == total - len(gaps)
    assert_close(got, wanted)


@pytest.mark.parametrize(
    ("version", "scored", "measured"),
    [
        (VERSION, -1, 10),
        (VERSION + 1, VERSION + 1, 10),
        (VERSION + 1, -1, 0),
        (VERSION + 2, VERSION + 1, 0),
        (VERSION - 1, -1, 0),
        (None, VERSION + 1, 0),
    ],
)
def test_what_is_measured_is_what_the_weights_in_hand_can_score(
    source: Path, version: int | None, scored: int, measured: int
) -> None:
    step = trainer(source, PolicyConfig(enabled=True, mismatch="truncate"))
    sample = told("s", 12, 1.0, [-5.0] * 11, proximal_versions=Runs.of([-1] * 2 + [scored] * 10))
    record = step.run([sample], 1, version=version)
    assert record["policy/mismatch_unmeasured_tokens"] == 10 - measured
    assert ("policy/mismatch_weight" in record) == (measured > 0)


def test_what_the_trainer_scored_itself_is_not_measured(source: Path) -> None:
    policy = PolicyConfig(enabled=True, mismatch="truncate", weight_cap=1e9, weight_floor=0.0)
    step = train_step(source, policy=policy, learning_rate=0.0)
    sample = told("s", 12, 1.0, [-5.0] * 11)
    line = Line.consecutive(VERSION + 1)
    taken = plan(sample, line, PolicyConfig(enabled=True), own_version=VERSION + 1)
    assert taken.recompute.sum() == 10
    filled = fill(taken, step.score([sample])[0], {}, PolicyConfig(enabled=True)).sample
    assert filled is not None
    record = step.run([filled], 1, version=VERSION + 1, own={sample.seq_id: taken.recompute})
    assert record["policy/mismatch_unmeasured_tokens"] == 10
    assert "policy/mismatch_weight" not in record
    few = taken.recompute & (np.arange(12) < 5)
    record = step.run([filled], 1, version=VERSION + 1, own={sample.seq_id: few})
    assert record["policy/mismatch_unmeasured_tokens"] == 3


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(-20, 0)] * 3, st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from(["token", "sequence"]),
)
def test_a_mismatch_weight_is_within_its_cap(
    drawn: list[tuple[float, float, float, bool, bool]], how: Any, level: Any
) -> None:
    logp, proximal, behaviour = torch.tensor([one[:3] for one in drawn], dtype=torch.float64).T
    mask, measured = torch.tensor([one[3:] for one in drawn]).T
    options = PolicyConfig(mismatch=how, mismatch_level=level, weight_cap=1e9, weight_floor=0.0, clip_eps_high=1e9)
    logp = logp.clone().requires_grad_()
    sums = policy_loss(logp, proximal, behaviour, torch.ones_like(logp), mask, options, measured=measured)
    sums.loss.backward()
    assert logp.grad is not None
    slopes = -logp.grad / (proximal - behaviour).exp()
    assert not slopes[~mask].any()
    assert (slopes[mask & measured] <= 2.0 * (1 + 1e-9)).all()
    assert sums.measured == (mask & measured).sum()
    if how == "mask":
        assert ((slopes[mask & measured] == 0) | (slopes[mask & measured] >= 0.5 * (1 - 1e-9))).all()
