"""Checkpoints in shards: what is written comes back, and a table that holds code is refused before any of it runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from sluice.consumers.training.ranks.sharding import shard_model
from sluice.consumers.training.shards import ShardsBeside, _Table, load_shards, save_shards
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import FsdpConfig
from sluice.pipeline.errors import DataError
from tests.deadlines import HANG_S
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("shards") / "model")


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> tuple[TrainStep, Path]:
    step = train_step(source, learning_rate=1e-3)
    step.run([random_sample("a", 12)], 1)
    save_shards(tmp_path / "shards", step.model, step.optimizer)
    return step, tmp_path / "shards"


def moments_of(step: TrainStep) -> dict[str, torch.Tensor]:
    state = step.optimizer.state_dict()["state"]
    return {f"{at} {name}": value for at, kept in state.items() for name, value in kept.items()}


def test_what_was_saved_comes_back(saved: tuple[TrainStep, Path], source: Path) -> None:
    step, shards = saved
    other = train_step(source, learning_rate=1e-3)
    load_shards(shards, other.model, other.optimizer)
    assert same(weights_of(other), weights_of(step))
    assert same(moments_of(other), moments_of(step))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield distributed.new_group(backend="gloo")
    distributed.destroy_process_group()


def test_shards_beside_the_steps_are_those_of_their_own_step(tmp_path: Path, source: Path, group: Any) -> None:
    step = train_step(source, learning_rate=1e-3)
    shard_model(step.model, FsdpConfig())
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-3)
    step.run([random_sample("a", 12)], 1)
    before = {name: value.full_tensor().clone() for name, value in step.model.state_dict().items()}
    writing = ShardsBeside(tmp_path / "shards", step.model, step.optimizer, group)
    step.run([random_sample("b", 12)], 2)
    after = {name: value.full_tensor().clone() for name, value in step.model.state_dict().items()}
    writing.wait(HANG_S)
    other = train_step(source)
    load_shards(tmp_path / "shards", other.model, other.optimizer)
    assert same(weights_of(other), before)
    assert not same(after, before)


def test_a_rank_that_cannot_write_is_named(tmp_path: Path, source: Path, group: Any) -> None:
    (tmp_path / "file").touch()
    step = train_step(source)
    with pytest.raises(DataError, match="rank 0 cannot write its part of the checkpoint"):
        save_shards(tmp_path / "file/trainer/shards", step.model, step.optimizer)
    with pytest.raises(DataError, match="rank 0 cannot write its part of the checkpoint"):
        ShardsBeside(tmp_path / "file/trainer/shards", step.model, step.optimizer, group).wait(HANG_S)


@pytest.mark.parametrize(
    "table",
    [
        b"cos\nsystem\n(S'touch %s'\ntR.",
        b'c__builtin__\neval\n(S\'open("%s", "w")\'\ntR.',
        b"ctorch\nload\n(S'%s'\ntR.",
    ],
)
def test_a_table_with_code_is_refused_before_it_runs(
    saved: tuple[TrainStep, Path], table: bytes, tmp_path: Path
) -> None:
    step, shards = saved
    trace = tmp_path / "ran"
    (shards / ".metadata").write_bytes(table % bytes(trace))
    with pytest.raises(CheckpointException, match="which the table of a checkpoint doesn't need"):
        load_shards(shards, step.model, step.optimizer)
    assert not trace.exists()


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_a_table_of_any_python_is_read(module: bytes) -> None:
    assert _Table(io.BytesIO(b"c%s\nPosixPath\n(S'part'\ntR." % module)).load() == Path("part")
