"""Ranks of the trainer killed in each phase of a step: the group ends, says whom it lost, and the next one goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.blows import MANY, end_rows
from tests.chaos.rank_blows import assert_each_once, start_and_kill
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import marked, wait_gone
from tests.e2e.ready_batches import STEPS, ready_run
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(("victim", "phase"), [(0, "publish"), (1, "step")])
def test_a_rank_killed_in_a_phase_loses_nothing(make_stack: MakeStack, victim: int, phase: str) -> None:
    """`make soak` kills every rank in every phase."""
    stack = ready_run(make_stack)
    start_and_kill(stack, phase, victim, ranks=2)
    assert_each_once(stack, STEPS)


def test_the_same_with_checkpoints_beside_the_steps(make_stack: MakeStack) -> None:
    stack = ready_run(make_stack, trainer={"keep_checkpoints": 10, "async_checkpoints": True})
    start_and_kill(stack, "acks", 1, ranks=2)
    assert_each_once(stack, STEPS)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_supervisor_starts_ranks_again(make_stack: MakeStack, blow: signal.Signals) -> None:
    stack = make_stack(
        detection_rows(MANY),
        trainer={"ranks": 2, "rank_timeout_s": 45.0},
        up={"restart_backoff_s": 0.1, "stop_grace_s": 10},
    )
    command = stack.start("up")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    os.kill(pid_of_rank(stack, 1), blow)
    end_rows(stack)
    assert command.wait(RUN_S) == 0, command.tail() + stack.report(stack.snapshot())
    stack.assert_exactly_once()
    said = (stack.run_dir / "logs/trainer.log").read_text()
    assert "error: rank 1 of 2 (pid" in said
    assert "rank 1 of 2 has ended or was stopped" in said or "rank 1 of 2 hangs" in said
    wait_gone(stack.mark)
    assert not stack.litter()


def pid_of_rank(stack: Stack, rank: int) -> int:
    until = time.monotonic() + RUN_S
    while time.monotonic() < until:
        for pid in marked(stack.mark):
            try:
                found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={rank}".encode() in found:
                return pid
        time.sleep(0.05)
    pytest.fail(f"there is no rank {rank}")
