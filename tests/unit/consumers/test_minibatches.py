"""Several optimiser steps on the parts of one batch: what is split, what each step sees, and what is reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.consumers.training.policy.loss import batch_normalised
from sluice.consumers.training.step import TrainStep, minibatches
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

VERSION = 6
RATE = 3e-3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8), st.randoms())
def test_groups_stay_together_and_nothing_is_lost(sizes: list[int], count: int, drawn: Any) -> None:
    samples = [
        replace(random_sample(f"{group}-{member}", 4), group_id=str(group))
        for group, size in enumerate(sizes)
        for member in range(size)
    ]
    drawn.shuffle(samples)
    parts = minibatches(samples, count)
    assert sorted(one.seq_id for part in parts for one in part) == sorted(one.seq_id for one in samples)
    assert len(parts) == min(count, len(sizes))
    groups = [{one.group_id for one in part} for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups))
    if count == 1:
        assert parts == [samples]
    if len(set(sizes)) == 1 and len(sizes) % count == 0:
        assert [len(part) for part in parts] == [len(samples) // count] * count
    assert minibatches(samples, count) == parts


@pytest.mark.parametrize(
    ("sizes", "count", "wanted"),
    [([3, 4], 2, [3, 4]), ([4, 3, 4, 4], 2, [7, 8]), ([4, 3, 4, 4, 4, 4], 3, [7, 8, 8]), ([1, 9], 2, [1, 9])],
)
def test_groups_that_lost_a_member_make_as_many_parts(sizes: list[int], count: int, wanted: list[int]) -> None:
    samples = [
        replace(random_sample(f"{group}-{member}", 4), group_id=str(group))
        for group, size in enumerate(sizes)
        for member in range(size)
    ]
    assert [len(part) for part in minibatches(samples, count)] == wanted


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def logprobs_of(model: Any, sample: TrainingSample) -> torch.Tensor:
    """float64 [T - 1], of each token after the first, from one plain pass; with gradient."""
    ids = torch.tensor(list(sample.token_ids))
    return model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def batch(source: Path, noise: float = 0.0) -> list[TrainingSample]:
    """Two groups of two, of unequal lengths, that also train by cross-entropy; sampled by the version in hand."""
    model, drawn = train_step(source).model, torch.Generator().manual_seed(5)
    found = []
    for at, (length, reward) in enumerate(((9, 1.5), (21, -0.5), (14, 0.25), (30, -1.0))):
        plain = random_sample(str(at), length)
        scores = logprobs_of(model, plain).detach()
        scores += noise * torch.randn(scores.shape, generator=drawn, dtype=torch.float64)
        sample = replace(
            plain,
            group_id=str(at // 2),
            group_rewards=2,
            index=at % 2,
            logprobs=FloatArray([0.0, *scores.tolist()]),
            proximal_logprobs=FloatArray([0.0, *scores.tolist()]),
            versions=Runs.of([-1] * 2 + [VERSION] * (length - 2)),
            response_mask=Runs.of([0] * 2 + [1] * (length - 2)),
            advantage=reward,
            reward=reward,
        )
        found.append(sample)
    return found


def trainer(source: Path, policy: PolicyConfig, **options: Any) -> TrainStep:
    return train_step(source, policy=policy, learning_rate=RATE, **options)


def reported(step: TrainStep, samples: Sequence[TrainingSample], **options: Any) -> dict[str, float]:
    return step.run(list(samples), 1, version=VERSION, **options)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_two_minibatches_are_two_steps_and_one_record(source: Path, aggregation: Any) -> None:
    policy = PolicyConfig(enabled=True, aggregation=aggregation, aggregation_tokens=16, entropy_coef=0.01)
    samples = batch(source)
    step, apart = trainer(source, policy, minibatches=2), trainer(source, policy)
    record = reported(step, samples)
    parts = [reported(apart, samples[:2]), reported(apart, samples[2:])]
    assert same(weights_of(step), weights_of(apart))
    whole = reported(trainer(source, policy), samples)
    assert record.keys() - whole.keys() == {"train/minibatches"}
    assert whole.keys() <= record.keys()

    def mean(key: str, weights: Sequence[float]) -> float:
        return float(np.average([part[key] for part in parts], weights=weights))

    tokens = [26, 40]
    divisors = {"token": tokens, "sequence": [2, 2], "constant": [32, 32]}[aggregation]
    sums = [sum(sum(one.weights) for one in part) for part in (samples[:2], samples[2:])]
    wanted = {
        "policy/loss": mean("policy/loss", divisors),
        "policy/tokens": 66.0,
        "policy/approx_kl": mean("policy/approx_kl", tokens),
        "policy/entropy": mean("policy/entropy", tokens),
        "policy/importance_weight": mean("policy/importance_weight", tokens),
        "policy/reward_mean": whole["policy/reward_mean"],
        "policy/advantage_std": whole["policy/advantage_std"],
        "train/loss": mean("train/loss", sums),
        "train/tokens": 74.0,
        "train/grad_norm": mean("train/grad_norm", [1, 1]),
        "train/minibatches": 2.0,
        "train/skipped_updates": 0.0,
        "train/learning_rate": RATE,
    }
    assert {key: record[key] for key in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert parts[1]["policy/approx_kl"] > 1e-6, "the first minibatch has moved the weights"


def test_the_engine_is_compared_with_the_weights_that_it_had(source: Path) -> None:
    """A minibatch moves the weights; what is left of the gap afterwards would be the optimiser's."""
    samples = batch(source)
    record = reported(trainer(source, PolicyConfig(enabled=True), minibatches=2), samples)
    assert record["policy/engine_logprob_gap_max"] < 1e-4


def test_advantages_over_the_batch_stay_those_of_the_batch(source: Path) -> None:
    samples = batch(source)
    options = PolicyConfig(enabled=True, advantage="reinforce_pp")
    step, apart = trainer(source, options, minibatches=2), trainer(source, PolicyConfig(enabled=True))
    reported(step, samples)
    normal = batch_normalised(samples, options)
    reported(apart, normal[:2])
    reported(apart, normal[2:])
    assert same(weights_of(step), weights_of(apart))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mismatch_is_measured_before_the_first_minibatch(source: Path, level: Any) -> None:
    """In the second one r is over the trainer's own logprob under the version, not under the moved weights."""
    policy = PolicyConfig(enabled=True, mismatch="truncate", mismatch_level=level, mismatch_cap=1.05, clip_eps=0.99)
    samples = [replace(one, weights=FloatArray([0.0] * len(one.token_ids))) for one in batch(source, noise=0.02)]
    model = train_step(source).model
    before = {one.seq_id: logprobs_of(model, one).detach()[1:] for one in samples}
    step = trainer(source, policy, minibatches=2, max_grad_norm=1e9)
    seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def look(*_: object) -> None:
        part = samples[2:] if seen else samples[:2]
        terms = []
        with torch.enable_grad():
            for one in part:
                gap = before[one.seq_id] - torch.tensor(list(one.proximal_logprobs)[2:], dtype=torch.float64)
                m = (gap.sum() + 0 * gap if level == "sequence" else gap).exp().clamp(max=1.05)
                ratio = (logprobs_of(step.model, one)[1:] - before[one.seq_id]).exp()
                terms.append(-(one.advantage or 0.0) * ratio * m)
            named = {name: value for name, value in step.model.named_parameters() if value.grad is not None}
            loss = torch.cat(terms).sum() / sum(map(len, terms))
            wanted = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        seen.append(({name: value.grad.clone() for name, value in named.items() if value.grad is not None}, wanted))

    step.optimizer.register_step_pre_hook(look)
    record = reported(step, samples)
    assert len(seen) == 2
    for got, wanted in seen:
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=5e-3, atol=2e-5)
    whole = reported(trainer(source, policy), samples)
    for key in ("policy/mismatch_weight", "policy/mismatch_tokens", "policy/mismatch_unmeasured_tokens"):
        assert record[key] == pytest.approx(whole[key], rel=1e-5)
    assert record["policy/mismatch_tokens"] > 0


def test_a_gradient_that_is_not_finite_costs_its_own_minibatch(source: Path) -> None:
    samples = batch(source)
    bad = replace(samples[0], weights=FloatArray([0.0] * 4 + [float("inf")] * 5))
    step = trainer(source, PolicyConfig(enabled=True), minibatches=2)
    start = weights_of(step)
    record = reported(step, [bad, *samples[1:]])
    assert (record["train/skipped_updates"], record["train/grad_norm"] > 0) == (1, True)
    assert not same(weights_of(step), start)


def test_a_minibatch_without_a_token_to_train_makes_no_update(source: Path) -> None:
    samples = [replace(one, weights=FloatArray([0.0] * len(one.token_ids))) for one in batch(source)]
    masked = [replace(one, response_mask=Runs.of([0] * len(one.token_ids))) for one in samples[2:]]
    step, apart = (
        trainer(source, PolicyConfig(enabled=True), minibatches=2),
        trainer(source, PolicyConfig(enabled=True)),
    )
    record, alone = reported(step, [*samples[:2], *masked]), reported(apart, samples[:2])
    assert same(weights_of(step), weights_of(apart))
    assert record["train/skipped_updates"] == 1
    assert record["train/grad_norm"] == pytest.approx(alone["train/grad_norm"])


def test_fewer_groups_make_fewer_minibatches(source: Path) -> None:
    record = reported(trainer(source, PolicyConfig(enabled=True), minibatches=8), batch(source))
    assert record["train/minibatches"] == 2
