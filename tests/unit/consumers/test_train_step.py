"""One optimiser step: packing leaks nothing, the split changes nothing, a bad gradient is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sluice.pipeline.wire.messages import GeometryTarget, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

LENGTHS = (9, 30, 17, 5, 24, 12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def batch() -> list[TrainingSample]:
    return [random_sample(f"s{at}", length) for at, length in enumerate(LENGTHS)]


def loss_of(source: Path, samples: list[TrainingSample], **options: Any) -> float:
    return train_step(source, **options).run(samples, 1)["train/loss"]


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(source: Path, attention: str | None) -> None:
    still = {"learning_rate": 0.0, "attention": attention}
    single, packed = train_step(source, row_tokens=1, **still), train_step(source, row_tokens=200, **still)
    for sample in batch()[:4]:
        mixed = [other if other.seq_id == sample.seq_id else silent(other) for other in batch()]
        alone = single.run([sample], 1)["train/loss"]
        assert packed.run(mixed, 1)["train/loss"] == pytest.approx(alone, abs=1e-5)


def silent(sample: TrainingSample) -> TrainingSample:
    """The same tokens without weight: it fills the row, and only a leak would show it."""
    return msgspec.structs.replace(sample, weights=FloatArray([0.0] * len(sample.token_ids)))


def test_the_loss_of_packed_rows_is_that_of_rows_of_one(source: Path) -> None:
    assert loss_of(source, batch(), row_tokens=100) == pytest.approx(loss_of(source, batch(), row_tokens=1), abs=1e-5)


def gradients(source: Path, **options: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    step = train_step(source, learning_rate=1e-2, **options)
    return step.run(batch(), 1), weights_of(step)


def test_the_split_into_micro_batches_changes_nothing(source: Path) -> None:
    whole, together = gradients(source, row_tokens=40)
    parts, apart = gradients(source, row_tokens=40, micro_batch_tokens=1)
    for key in ("train/loss", "train/grad_norm", "train/tokens"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-4)
    assert max(float((together[name] - apart[name]).abs().max()) for name in together) < 1e-3


def test_a_step_lowers_the_loss(source: Path) -> None:
    step = train_step(source, learning_rate=3e-3)
    losses = [step.run(batch(), number)["train/loss"] for number in range(1, 9)]
    assert losses[-1] < losses[0] * 0.8


def test_the_gradient_is_clipped_to_its_norm(source: Path) -> None:
    step = train_step(source, max_grad_norm=1e-3)
    seen: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()))

    step.optimizer.register_step_pre_hook(look)
    norm = step.run(batch(), 1)["train/grad_norm"]
    assert norm > 1e-3  # what is reported is the norm before
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(source: Path) -> None:
    step = train_step(source)
    step.prove()
    with torch.no_grad():
        step.model.model.norm.weight[0] = float("nan")
    before = weights_of(step)
    record = step.run(batch(), 1)
    assert (record["train/skipped_updates"], record["train/grad_norm"]) == (1.0, 0.0)
    after = weights_of(step)
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_warm_up_scales_the_learning_rate(source: Path) -> None:
    step = train_step(source, learning_rate=1e-2, warmup_steps=4)
    rates = [step.run(batch()[:1], number)["train/learning_rate"] for number in (1, 2, 4, 9)]
    assert rates == pytest.approx([0.0025, 0.005, 0.01, 0.01])


def test_samples_without_weight_change_nothing(source: Path) -> None:
    step = train_step(source)
    before = weights_of(step)
    record = step.run([silent(sample) for sample in batch()], 1)
    assert record["train/loss"] == 0.0
    assert same(before, weights_of(step))


def with_first(sample: TrainingSample, weight: float) -> TrainingSample:
    return msgspec.structs.replace(sample, weights=FloatArray([weight, *sample.weights[1:]]))


def test_the_weight_of_the_first_token_counts_nowhere(source: Path) -> None:
    """It has no context to predict it from, so it isn't trained."""
    plain, odd = train_step(source), train_step(source)
    wanted = plain.run(batch(), 1)
    assert odd.run([with_first(sample, 3.0) for sample in batch()], 1) == wanted
    assert same(weights_of(odd), weights_of(plain))
    before = weights_of(odd)
    assert odd.run([with_first(silent(batch()[0]), 1.0)], 2)["train/skipped_updates"] == 1.0
    assert same(weights_of(odd), before)


def test_geometry_is_learnt_from_the_coordinate_tokens(source: Path) -> None:
    target = GeometryTarget(positions=(3, 4, 5, 6), box=(0, 0, 999, 999))
    sample = msgspec.structs.replace(silent(random_sample("g", 10)), geometry=[target])
    step = train_step(source, coord_ids=tuple(range(100, 120)), learning_rate=3e-3)
    losses = [step.run([*batch(), sample], number)["train/geometry_loss"] for number in range(1, 9)]
    assert 0 < losses[-1] < losses[0]
    alone = train_step(source, coord_ids=tuple(range(100, 120)), row_tokens=1).run([*batch(), sample], 1)
    packed = train_step(source, coord_ids=tuple(range(100, 120)), row_tokens=200).run([*batch(), sample], 1)
    assert packed["train/geometry_loss"] == pytest.approx(alone["train/geometry_loss"], abs=1e-5)
