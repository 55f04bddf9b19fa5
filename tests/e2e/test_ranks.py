"""The trainer on several ranks: `trainer.ranks`, torchrun and `accelerate launch`, beside the plain trainer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice.bench.ranks import CASES, gradient_errors
from sluice.consumers.training.trainer import train
from sluice.pipeline.config import load_config
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import BIN, Process, wait_gone
from tests.e2e.ready_batches import STEPS, TOLERANCE, apart, ready_run
from tests.e2e.stack import STOPPED, Stack

FSDP = Path(__file__).parents[2] / "configs/accelerate/fsdp.yaml"


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_records_are_those_of_one_process(ranks: int) -> None:
    found = asyncio.run(gradient_errors(ranks))
    assert found.keys() == set(CASES)
    for case, apart_by in found.items():
        assert apart_by["parameters"] > 30, case
        assert apart_by["gradient"] < 1e-5, case
        assert apart_by["record"] < 1e-4, case


def versions(stack: Stack) -> dict[int, dict[str, torch.Tensor]]:
    root = stack.run_dir / "weights"
    return {number: load_file(root / f"v{number:06d}/model.safetensors") for number in range(1, STEPS + 1)}


def ended_well(process: Process) -> str:
    assert process.wait() == 0, process.tail()
    return process.text()


def on_ranks(stack: Stack, ranks: int, until: int) -> str:
    more = ("--set", f"trainer.ranks={ranks}", "--set", f"trainer.max_versions={until}")
    return ended_well(stack.start("train", *more))


@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "beside the steps"])
def test_a_run_goes_on_with_any_number_of_ranks(make_stack: MakeStack, beside: bool) -> None:
    trainer = {"keep_checkpoints": 10, "async_checkpoints": beside}
    plain, spread = (ready_run(make_stack, weights={"retention": 10}, trainer=trainer) for _ in range(2))
    for step, ranks in enumerate((1, 4, 2, 1), start=1):
        said = on_ranks(spread, ranks, step)
        assert ("by=FSDP2" in said) == (ranks > 1)
        assert (f"event=resumed step={step - 1}" in said) == (step > 1)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)
    assert (spread.run_dir / "checkpoints/step-000002/trainer/shards").is_dir()
    assert not (spread.run_dir / "checkpoints/step-000004/trainer/shards").exists()


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_another_launcher_starts_the_ranks(make_stack: MakeStack, launcher: str) -> None:
    plain, spread = (ready_run(make_stack, weights={"retention": 10}) for _ in range(2))
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
    stack = make_stack(detection_rows(40), trainer={"ranks": 2, "learning_rate": 1e-3})
    for role in ("worker", "consume", "produce", "train"):
        stack.start(role)
    stack.finish()
    stack.assert_exactly_once()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(make_stack: MakeStack, number: signal.Signals) -> None:
    stack = make_stack(detection_rows(1), trainer={"ranks": 2})
    trainer = stack.start("train")
    trainer.expendable = True
    stack.wait(lambda _: "event=published version=0" in trainer.text(), "the first version", 300)
    trainer.signal(number)
    assert trainer.wait() == {signal.SIGTERM: STOPPED, signal.SIGKILL: -signal.SIGKILL}[number], trainer.tail()
    wait_gone(stack.mark, 60)
    assert "ranks were not told of the end" not in trainer.text()
    assert not stack.litter()
