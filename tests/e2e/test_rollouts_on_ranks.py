"""A training loop of one's own on several ranks (the example), beside the one of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import Process, marked
from tests.e2e.ready_batches import LENGTH, STEPS, TOLERANCE, apart, hand_on, ready_run, text_samples
from tests.e2e.stack import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = {"external": True, "rank_timeout_s": 60.0, "batch_wait_s": 30.0}


def loop(stack: Stack, ranks: int) -> Process:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(EXAMPLES / "custom_trainer_ranks.py"), str(stack.config_file)]
    return stack.spawn([*torchrun, *script], name=f"loop-{ranks}")


def versions(stack: Stack) -> dict[int, dict[str, torch.Tensor]]:
    root = stack.run_dir / "weights"
    return {number: load_file(root / f"v{number:06d}/model.safetensors") for number in range(1, STEPS + 1)}


def assert_each_once(stack: Stack, steps: int = STEPS) -> None:
    counted = Counter(stack.trained())
    assert len(counted) == 2 * steps
    assert set(counted.values()) == {1}
    assert stack.snapshot().trained == 2 * steps


def expect_more(stack: Stack) -> None:
    """What was handed on is not the end of the run."""
    with contextlib.closing(stack.client()) as client:
        client.hdel(stack.keys.source, "exhausted")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_publish_what_one_process_does(make_stack: MakeStack, ranks: int) -> None:
    """Of three ranks one has no sample of a batch of two."""
    plain, spread = (ready_run(make_stack, weights={"retention": 10}, trainer=OWN) for _ in range(2))
    alone = plain.spawn([sys.executable, str(EXAMPLES / "custom_trainer.py"), str(plain.config_file)], name="alone")
    together = loop(spread, ranks)
    for process in (alone, together):
        assert process.wait() == 0, process.tail()
        said = [line for line in process.text().splitlines() if line.startswith("version ")]
        assert [line.split(",")[0] for line in said] == [f"version {at}: 2 samples" for at in range(1, STEPS + 1)]
    assert_each_once(spread)
    ours, theirs = versions(spread), versions(plain)
    assert all(apart(ours[number], theirs[number]) < TOLERANCE for number in ours)
    settings = [(one.run_dir / "weights/v000002/config.json").read_bytes() for one in (spread, plain)]
    assert b"FSDP" not in settings[0]


def test_a_batch_without_any_weight_has_a_loss_of_0(make_stack: MakeStack) -> None:
    def samples_of(step: int) -> list[TrainingSample]:
        weights = FloatArray([float(step != 1)] * LENGTH)
        return [replace(one, weights=weights) for one in text_samples(step)]

    stack = ready_run(make_stack, samples_of, weights={"retention": 10}, trainer=OWN)
    process = loop(stack, 2)
    assert process.wait() == 0, process.tail()
    assert_each_once(stack)
    assert "loss 0.0000" in process.text()
    assert "nan" not in process.text()


def test_all_ranks_wait_for_a_batch_as_long_as_one_process_does(make_stack: MakeStack) -> None:
    # A rank that heard nothing of rank 0 would give it up before the second of these.
    stack = ready_run(make_stack, trainer={**OWN, "rank_timeout_s": 25.0, "batch_wait_s": 32.0}, steps=1)
    expect_more(stack)
    process = loop(stack, 2)
    assert process.wait() != 0
    assert "version 1: " in process.text()
    assert "DeadlineExceeded: no training batch for 32 s" in process.text(), process.tail()
    assert "RankLost" not in process.text()


def test_a_killed_rank_ends_the_loop_and_the_next_one_goes_on(make_stack: MakeStack) -> None:
    stack = ready_run(make_stack, trainer={**OWN, "batch_wait_s": RUN_S}, steps=STEPS)
    expect_more(stack)  # it can't be over before the kill
    first = loop(stack, 2)
    first.expendable = True
    stack.wait(lambda _: "version 2: " in first.text(), "two versions")
    for pid in marked(stack.mark):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    assert first.wait() != 0, first.tail()
    hand_on(stack, text_samples, 2 * STEPS, first=STEPS)
    last = loop(stack, 1)
    assert last.wait() == 0, last.tail()
    assert_each_once(stack, 2 * STEPS)
