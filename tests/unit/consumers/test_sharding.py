"""What `accelerate launch` is taken to ask for, and state dicts that stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sluice.consumers.training import checkpoint
from sluice.consumers.training.model import probe_score
from sluice.consumers.training.ranks.launch import wants_ranks
from sluice.consumers.training.ranks.sharding import (
    keep_model_whole,
    keep_optimizer_whole,
    sharding,
    started_by_torchrun,
    started_sharded,
)
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

# As the launcher of accelerate 1.15 sets them.
FSDP2 = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "false",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


def test_only_a_launch_with_fsdp_shards() -> None:
    assert started_sharded(FSDP2)
    assert started_sharded({**FSDP2, "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert not started_sharded({})
    assert not started_sharded({"ACCELERATE_MIXED_PRECISION": "bf16"})  # set by hand, for another program
    assert not started_sharded({"LOCAL_RANK": "0", "WORLD_SIZE": "4", "FSDP_VERSION": "2"})  # a scheduler
    assert not started_sharded({"LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"})


def test_what_torchrun_started() -> None:
    alone = {"LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    assert not started_by_torchrun(alone)  # a scheduler
    assert started_by_torchrun({**alone, "TORCHELASTIC_RUN_ID": "none"})
    assert not started_by_torchrun({**FSDP2, "TORCHELASTIC_RUN_ID": "none"})  # by accelerate


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.ranks=3"], "trainer.ranks: 2, as many as were started"),
        (["trainer.dropout=true"], "trainer.dropout: false"),
        (["trainer.lora.rank=4", "trainer.lora.dropout=0.1"], "trainer.lora.dropout: 0"),
        (["trainer.claim_gpu=true"], "trainer.claim_gpu: false"),
        (["trainer.optimizer=muon"], "trainer.optimizer: adamw"),
        (["model.device=cuda:1"], "model.device: cuda"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(
    overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=f"not supported on 2 ranks; set {says}"),
        sharding(load_config(None, overrides)),
    ):
        pytest.fail("it started")


def test_only_a_configuration_of_ranks_asks_for_them() -> None:
    assert not wants_ranks(load_config(None, []))
    assert wants_ranks(load_config(None, ["trainer.ranks=2"]))
    assert wants_ranks(load_config(None, ["trainer.fsdp.mixed_precision=bf16"]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"WORLD_SIZE": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading: false"),
        ({"ACCELERATE_USE_FSDP": ""}, "distributed_type: FSDP"),
        ({"ACCELERATE_USE_FSDP": "", "ACCELERATE_USE_DEEPSPEED": "true"}, "distributed_type: FSDP"),
        ({"FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: false"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_key_to_set(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        started_sharded({**FSDP2, **changes})


def test_a_plain_trainer_gets_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FSDP2:
        monkeypatch.delenv(name, raising=False)
    with sharding(load_config(None, ["model.device=cpu"])) as shards:
        assert shards is None
        assert not distributed.is_initialized()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded_step(source: Path) -> TrainStep:
    """Sharded by torch alone: the whole model at once, which keeps a tied embedding in one group."""
    step = train_step(source, learning_rate=1e-3)
    model: Any = step.model
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = {name: step.optimizer.defaults[name] for name in ("lr", "betas", "weight_decay", "fused")}
    step.optimizer = torch.optim.AdamW(model.parameters(), **options)
    keep_model_whole(model)
    keep_optimizer_whole(step.optimizer)
    return step


def plain_step(source: Path) -> TrainStep:
    """With a head that is called, as a sharded one is: else its passes are written out, and rounded differently."""
    step = train_step(source, learning_rate=1e-3)
    step.model.get_output_embeddings().register_forward_hook(lambda *_: None)
    return step


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_a_sharded_model_is_a_plain_one(tied: bool, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", tied=tied)
    plain, sharded = plain_step(source), sharded_step(source)
    for number in (1, 2):
        for step in (plain, sharded):
            step.run([random_sample("a", 12), random_sample("b", 30)], number)
    state = checkpoint.TrainerState(step=2)
    for name, step in (("plain", plain), ("sharded", sharded)):
        (tmp_path / name).mkdir()
        checkpoint.save(tmp_path / name, step.model, step.optimizer, state, source)
    assert all(isinstance(param, DTensor) for param in sharded.model.parameters())
    assert not any(isinstance(value, DTensor) for value in weights_of(sharded).values())
    crossed = {"plain": sharded_step(source), "sharded": plain_step(source)}
    for saved_by, step in crossed.items():
        probe_score(step.model, [1, 2, 3])  # leaves the last layers gathered
        checkpoint.load(tmp_path / saved_by / "step-000002", step.model, step.optimizer)
        assert same(weights_of(step), weights_of({"plain": plain, "sharded": sharded}[saved_by]))
        step.run([random_sample("c", 20)], 3)
    plain.run([random_sample("c", 20)], 3)
    for step in crossed.values():
        trained, expected = weights_of(step), weights_of(plain)
        assert max(float((trained[name] - expected[name]).abs().max()) for name in expected) < 1e-6


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.ranks=4"], r"trainer\.ranks 4: it isn't combined with FSDP"),
        (["trainer.fsdp.cpu_offload=true"], r"with trainer\.fsdp: only one of them"),
        (["trainer.lora.rank=4"], r"with trainer\.lora: only one of them"),
        (["trainer.async_checkpoints=true"], r"with trainer\.async_checkpoints"),
    ],
)
def test_what_tensor_parallelism_is_not_combined_with(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, ["trainer.ranks=2", "trainer.tensor_parallel=2", *overrides])
