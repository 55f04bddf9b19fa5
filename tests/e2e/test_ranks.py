"""The trainer on several ranks: `trainer.ranks`, torchrun and `accelerate launch`, beside the plain trainer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sluice.bench.ranks import CASES, TENSOR_PARALLEL, gradient_errors
from sluice.consumers.training.trainer import train
from sluice.pipeline.config import load_config
from sluice.pipeline.wire.messages import TrainingSample
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import BIN, Process, wait_gone
from tests.e2e.ready_batches import STEPS, TOLERANCE, apart, ready_run
from tests.e2e.stack import STOPPED, Stack
from tests.seen_samples import image_files, processor_of, seeing_config, seen_sample
from tests.tiny_models import save_tiny_model
from tests.tiny_vision_models import save_tiny_qwen3_vl

FSDP = Path(__file__).parents[2] / "configs/accelerate/fsdp.yaml"


def test_gradients_and_records_are_those_of_one_process() -> None:
    found = asyncio.run(gradient_errors(4))
    assert found.keys() == set(CASES)
    for case, apart_by in found.items():
        assert apart_by["parameters"] > 30, case
        assert apart_by["gradient"] < 1e-5, case
        assert apart_by["record"] < 1e-4, case


def test_gradients_of_tensor_parallelism_are_those_of_one_process() -> None:
    """Over several passes too: transformers sums some gradients over ranks behind each of them."""
    found = asyncio.run(gradient_errors(2, TENSOR_PARALLEL))
    for case, apart_by in found.items():
        assert apart_by["gradient"] < 1e-5, case
        assert apart_by["record"] < 1e-4, case


def versions(stack: Stack) -> dict[int, dict[str, torch.Tensor]]:
    """Whole, or adapters."""
    root = stack.run_dir / "weights"
    files = {number: next((root / f"v{number:06d}").glob("*.safetensors")) for number in range(1, STEPS + 1)}
    return {number: load_file(file) for number, file in files.items()}


def ended_well(process: Process) -> str:
    assert process.wait() == 0, process.tail()
    return process.text()


def on_ranks(stack: Stack, ranks: int, until: int, *options: str) -> str:
    more = ("--set", f"trainer.ranks={ranks}", "--set", f"trainer.max_versions={until}")
    more += tuple(part for option in options for part in ("--set", option))
    return ended_well(stack.start("train", *more))


def test_a_run_goes_on_with_any_number_of_ranks(make_stack: MakeStack) -> None:
    """Its checkpoints are waited for, and written beside the steps, in turns."""
    plain, spread = (ready_run(make_stack, weights={"retention": 10}) for _ in range(2))
    for step, (ranks, beside) in enumerate(((1, "false"), (4, "true"), (2, "false"), (1, "true")), start=1):
        said = on_ranks(spread, ranks, step, f"trainer.async_checkpoints={beside}")
        assert ("by=FSDP2" in said) == (ranks > 1)
        assert (f"event=resumed step={step - 1}" in said) == (step > 1)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)
    assert (spread.run_dir / "checkpoints/step-000002/trainer/shards").is_dir()
    assert not (spread.run_dir / "checkpoints/step-000004/trainer/shards").exists()


def test_a_run_goes_on_with_tensor_parallelism_and_without(make_stack: MakeStack, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(264)  # rows of the output layer are divided among the ranks
    model.save_pretrained(directory)
    sections: dict[str, Any] = {
        "model": {"path": str(directory), "device": "cpu"},
        "trainer": {"keep_checkpoints": 10},
        "weights": {"retention": 10},
    }
    plain, spread = (ready_run(make_stack, **sections) for _ in range(2))
    for step, (ranks, shared) in enumerate(((2, 2), (2, 1), (2, 2), (1, 1)), start=1):
        said = on_ranks(spread, ranks, step, f"trainer.tensor_parallel={shared}")
        assert ('by="tensor parallel"' in said) == (shared > 1), said
        assert (f"event=resumed step={step - 1}" in said) == (step > 1)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)


def test_adapters_go_on_with_any_number_of_ranks(make_stack: MakeStack) -> None:
    """Checkpoints of them are whole, and beside the steps as well."""
    trainer = {"keep_checkpoints": 10, "lora": {"rank": 4}, "learning_rate": 1e-2, "async_checkpoints": True}
    plain, spread = (ready_run(make_stack, weights={"retention": 10}, trainer=trainer) for _ in range(2))
    for ranks, until in ((1, 1), (2, 3), (1, STEPS)):
        assert ("by=FSDP2" in on_ranks(spread, ranks, until)) == (ranks > 1)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)
    assert max(float(tensor.abs().max()) for name, tensor in ours[STEPS].items() if "lora_B" in name) > 1e-3
    assert not list(spread.run_dir.glob("checkpoints/*/trainer/shards"))
    assert apart(moments(spread), moments(plain)) < TOLERANCE


def moments(stack: Stack) -> dict[str, torch.Tensor]:
    found = load_file(stack.run_dir / f"checkpoints/step-{STEPS:06d}/trainer/optimizer.safetensors")
    return {name: tensor for name, tensor in found.items() if name != "rng"}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen vision tower", "trained vision tower"])
def test_images_are_trained_on_ranks(make_stack: MakeStack, tmp_path: Path, frozen: bool) -> None:
    """In some passes one rank has images and the other has none."""
    model, root = save_tiny_qwen3_vl(tmp_path / "model"), tmp_path / "scans"
    config = seeing_config(model, root)
    processor = processor_of(config)

    def samples_of(step: int) -> list[TrainingSample]:
        refs = image_files(root, 2, seed=10 * step)
        return [
            replace(sample, advantage=1.0 - 2 * member)
            for member in range(2)
            for sample in [
                seen_sample(f"{step}-{member}", config, processor, refs[: (step + member) % 3], seed=10 * step)
            ]
        ]

    sections: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "images": {"roots": [str(root)]},
        "trainer": {"keep_checkpoints": 10, "freeze_vision": frozen},
        "weights": {"retention": 10},
    }
    plain, spread = (ready_run(make_stack, samples_of, **sections) for _ in range(2))
    on_ranks(spread, 2, STEPS)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)
    tower = [name for name in ours[1] if "visual" in name]
    assert all(torch.equal(ours[1][name], ours[STEPS][name]) for name in tower) == frozen
    assert not (spread.run_dir / ".pixels").exists()


@pytest.mark.parametrize(
    ("launcher", "adapter"),
    [("torchrun", 0), ("accelerate", 0), ("accelerate", 4)],
    ids=["torchrun", "accelerate", "accelerate with adapters"],
)
def test_another_launcher_starts_the_ranks(make_stack: MakeStack, launcher: str, adapter: int) -> None:
    trainer = {"lora": {"rank": adapter}}
    plain, spread = (ready_run(make_stack, weights={"retention": 10}, trainer=trainer) for _ in range(2))
    start = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"],
        "accelerate": [
            str(BIN / "accelerate-launch"),
            "--config_file",
            str(FSDP),
            "--num_processes",
            "2",
            "--no_python",
        ],
    }[launcher]
    launched = spread.spawn([*start, str(BIN / "sluice"), "train", "-c", str(spread.config_file)], name="launched")
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    assert "by=FSDP2" in ended_well(launched)
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)


def test_each_sample_of_a_run_is_trained_once(make_stack: MakeStack) -> None:
    """All of it by one command, with passes in bf16, which the probe's tolerance then has to allow for."""
    trainer = {"ranks": 2, "learning_rate": 1e-3, "fsdp": {"mixed_precision": "bf16"}}
    stack = make_stack(detection_rows(40), trainer=trainer, weights={"probe_tolerance": 0.1})
    run = stack.start("run")
    assert run.wait(RUN_S) == 0, run.tail()
    stack.assert_exactly_once()
    log = (stack.run_dir / "logs/worker-0.log").read_text()
    assert "weights loaded" in log
    assert "weights refused" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(make_stack: MakeStack, number: signal.Signals) -> None:
    stack = make_stack(detection_rows(1), trainer={"ranks": 2})
    trainer = stack.start("train")
    trainer.expendable = True
    stack.wait(lambda _: "event=published version=0" in trainer.text(), "the first version")
    trainer.signal(number)
    assert trainer.wait() == {signal.SIGTERM: STOPPED, signal.SIGKILL: -signal.SIGKILL}[number], trainer.tail()
    wait_gone(stack.mark)
    assert "ranks were not told of the end" not in trainer.text()
    assert not stack.litter()
