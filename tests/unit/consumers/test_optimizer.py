"""Optimisers by name, whole over a checkpoint; the learning rate of each step."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.consumers.training import checkpoint
from sluice.consumers.training.checkpoint import TrainerState
from sluice.consumers.training.optimizer import learning_rate, optimizer_name
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import TrainerConfig
from sluice.pipeline.errors import ConfigError
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def steps(step: TrainStep, first: int, last: int) -> list[float]:
    samples = [random_sample("a", 20), random_sample("b", 11)]
    return [step.run(samples, number)["train/loss"] for number in range(first, last + 1)]


def resumed_step(source: Path, home: Path, options: dict[str, Any]) -> TrainStep:
    """After six steps, the last three from a checkpoint."""
    first, resumed = train_step(source, **options), train_step(source, **options)
    steps(first, 1, 3)
    directory = checkpoint.save(home, first.model, first.optimizer, TrainerState(step=3), source)
    checkpoint.load(directory, resumed.model, resumed.optimizer)
    steps(resumed, 4, 6)
    return resumed


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(source: Path) -> None:
    step = train_step(source, optimizer="muon", learning_rate=3e-3)
    named = {id(param): name for name, param in step.model.named_parameters()}
    matrices, others = ({named[id(param)] for param in group["params"]} for group in step.optimizer.param_groups)
    assert matrices == {name for name in named.values() if ".layers." in name and name.endswith("proj.weight")}
    assert matrices | others == set(named.values())
    assert any("embed_tokens" in name for name in others)
    losses = steps(step, 1, 8)
    assert losses[-1] < losses[0] * 0.8
    assert {group["lr"] for group in step.optimizer.param_groups} == {3e-3}


def test_the_first_update_of_muon_is_orthogonal_and_as_large_as_adamws(source: Path) -> None:
    step = train_step(source, optimizer="muon", learning_rate=1e-2)
    before = weights_of(step)
    steps(step, 1, 1)
    for name, value in weights_of(step).items():
        if ".layers." in name and name.endswith("proj.weight"):
            moved = (before[name] - value) / (1e-2 * 0.2 * math.sqrt(max(value.shape)))
            sizes = torch.linalg.svdvals(moved.float())[:8]  # a few tokens make few directions
            assert 0.6 < float(sizes.min()) <= float(sizes.max()) < 1.3  # five Newton-Schulz steps come near 1


def test_a_resumed_run_with_muon_has_bit_identical_weights(tmp_path: Path, source: Path) -> None:
    options: dict[str, Any] = {"optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.1, "schedule": "cosine",
                               "schedule_steps": 6}  # fmt: skip
    straight = train_step(source, **options)
    steps(straight, 1, 6)
    assert same(weights_of(straight), weights_of(resumed_step(source, tmp_path, options)))


def test_another_optimiser_cannot_continue(tmp_path: Path, source: Path) -> None:
    for saved, other in (("muon", "adamw"), ("adamw", "muon")):
        step = train_step(source, optimizer=saved)
        steps(step, 1, 1)
        root = tmp_path / saved
        root.mkdir()
        directory = checkpoint.save(root, step.model, step.optimizer, TrainerState(step=1), source)
        assert optimizer_name(step.optimizer) == saved
        another = train_step(source, optimizer=other)
        with pytest.raises(ConfigError, match=f"trained with trainer.optimizer {saved}, .*set it to {saved}"):
            checkpoint.load(directory, another.model, another.optimizer)


def test_a_checkpoint_without_a_name_is_adamws(tmp_path: Path, source: Path) -> None:
    step = train_step(source)
    steps(step, 1, 1)
    directory = checkpoint.save(tmp_path, step.model, step.optimizer, TrainerState(step=1), source)
    file = directory / "trainer/optimizer.safetensors"
    save_file(load_file(file), file)
    assert checkpoint.load(directory, step.model, step.optimizer).step == 1


def test_eight_bits_need_their_package(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs bitsandbytes, .*pip install bitsandbytes"):
        train_step(source, optimizer="adamw_8bit")


def test_a_resumed_run_with_eight_bits_has_bit_identical_weights(tmp_path: Path, source: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"optimizer": "adamw_8bit", "learning_rate": 1e-2, "weight_decay": 0.1}
    straight = train_step(source, **options)
    losses = steps(straight, 1, 6)
    assert losses[-1] < losses[0] * 0.8
    assert any(value.dtype == torch.uint8 for kept in straight.optimizer.state.values() for value in kept.values()
               if isinstance(value, torch.Tensor))  # fmt: skip
    assert same(weights_of(straight), weights_of(resumed_step(source, tmp_path, options)))
    directory = checkpoint.save(tmp_path, straight.model, straight.optimizer, TrainerState(step=6), source)
    with pytest.raises(ConfigError, match="adamw_8bit"):
        checkpoint.load(directory, train_step(source).model, train_step(source).optimizer)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"warmup_steps": 4}, {1: 0.25, 4: 1.0, 5: 1.0, 1000: 1.0}),
        ({"schedule": "linear", "schedule_steps": 10}, {1: 1.0, 6: 0.5, 10: 0.1, 11: 0.0, 12: 0.0}),
        (
            {"schedule": "linear", "schedule_steps": 14, "warmup_steps": 4, "min_learning_rate": 0.2},
            {2: 0.5, 4: 1.0, 5: 1.0, 10: 0.6, 15: 0.2, 99: 0.2},
        ),
        (
            {"schedule": "cosine", "schedule_steps": 12, "warmup_steps": 4},
            {4: 1.0, 5: 1.0, 7: 0.5 + math.sqrt(2) / 4, 9: 0.5, 13: 0.0},
        ),
        (
            {"schedule": "cosine", "max_versions": 5, "publish_every": 2, "min_learning_rate": 0.5},
            {1: 1.0, 6: 0.75, 11: 0.5},
        ),
    ],
)
def test_the_learning_rate(options: dict[str, Any], wanted: dict[int, float]) -> None:
    config = TrainerConfig(learning_rate=1.0, **options)
    assert {step: learning_rate(config, step) for step in wanted} == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_scheduled_step_trains(schedule: Any) -> None:
    for last in (1, 2, 7):
        config = TrainerConfig(learning_rate=1.0, schedule=schedule, max_versions=last)
        assert all(learning_rate(config, step) > 0 for step in range(1, last + 1))
        assert learning_rate(config, last + 1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trainer.schedule=cosine", "trainer.schedule cosine needs to know when it ends"),
        (
            "trainer.schedule=linear trainer.schedule_steps=5 trainer.warmup_steps=5",
            "ends at step 5, within the 5 steps",
        ),
        ("trainer.min_learning_rate=1", "trainer.min_learning_rate 1.0 must be in 0..trainer.learning_rate"),
        ("trainer.schedule_steps=5", "do nothing with trainer.schedule constant"),
        ("trainer.warmup_steps=-1", "trainer.warmup_steps must be >= 0"),
        ("trainer.optimizer=sgd", "trainer.optimizer"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, change.split(), {})
    assert words in str(caught.value)
