"""TRL's asynchronous trainer (the example, killed in the middle) beside a real run with a reward."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]
AHEAD = 24  # sequences: as far as the producer may be ahead of the trainer
REWARD = "def score(text, truth, row):\n    return float(len(text) % 3)\n"


def trainer(stack: Stack, example: str) -> Process:
    command = [sys.executable, "-m", "tests.trl_on_cpu", str(ROOT / "examples" / example), str(stack.config_file)]
    return stack.spawn(command, name="trl", PYTHONPATH=str(ROOT), TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")


def reward_run(make_stack: MakeStack, staleness: int) -> Stack:
    stack = make_stack(text_rows(20), "reward")
    (stack.directory / "lengths.py").write_text(REWARD)
    return stack.configure(
        producer={"group_size": 2, "max_staleness": staleness},
        rollout_matching={"reward": "lengths.py:score"},
        policy={"enabled": True, "advantage": "group_mean"},
        scorer={"count": 0},
        trainer={"external": True},
    )


def assert_each_once(stack: Stack, trained: int) -> None:
    now = stack.snapshot()
    assert (now.enqueued, now.trained, now.dead, now.dropped) == (40, trained, 0, 40 - trained)
    assert max(Counter(stack.trained()).values()) == 1
    assert len(stack.trained()) == trained
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def test_the_asynchronous_trainer_is_killed_and_the_run_completes(make_stack: MakeStack) -> None:
    stack = reward_run(make_stack, 2)
    run = stack.start("run")
    now = stack.wait(lambda now: now.enqueued == AHEAD and now.alive("producer"), "the producer to be ahead")
    [producer] = now.alive("producer")
    os.kill(producer.pid, signal.SIGSTOP)  # the first trainer can't come to the end of the run
    first = trainer(stack, "trl_async_grpo.py")
    stack.wait(lambda now: (now.latest_version or 0) >= 2, "two versions of the first trainer")
    first.kill()
    os.kill(producer.pid, signal.SIGCONT)
    second = trainer(stack, "trl_async_grpo.py")
    assert run.wait() == 0, stack.report(stack.snapshot())
    assert second.wait() == 0, second.tail()
    assert_each_once(stack, 40)


def test_the_rollout_function_trains_in_lockstep(make_stack: MakeStack) -> None:
    stack = reward_run(make_stack, 0)
    run = stack.start("run")
    loop = trainer(stack, "trl_grpo.py")
    assert run.wait() == 0, stack.report(stack.snapshot())
    assert loop.wait() == 0, loop.tail()
    assert_each_once(stack, 40)
    assert stack.snapshot().latest_version == 5
