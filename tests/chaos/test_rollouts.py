"""Agent rollouts while processes die: worker, gateway, rollout server and producer, each in the middle of rollouts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.blows import PATIENT
from tests.deadlines import RUN_S
from tests.e2e.agents import KEYS, agent_rows, agent_stack, assert_each_trained_once, tools_dir
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import marked, wait_gone
from tests.e2e.stack import Stack

__all__ = ["tools_dir"]
pytestmark = pytest.mark.chaos
VICTIMS = ("worker", "gateway", "rollout-server", "produce")


def strike(stack: Stack, command: str) -> None:
    """SIGKILL to the process of a run that plays a role, while rollouts are open."""
    until = time.monotonic() + RUN_S
    before = stack.wait(lambda now: now.open_rollouts, f"rollouts, before {command} is killed")
    word = f" {command} "
    while not (pids := [pid for pid, line in marked(stack.mark).items() if word in line and "main" in line]):
        assert time.monotonic() < until, f"no process of {command} is alive\n{stack.report(before)}"
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)


def test_killed_servers_and_workers_lose_and_repeat_no_rollout(make_stack: MakeStack, tools_dir: Path) -> None:
    often = {"max_restarts": 50, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2}
    stack = agent_stack(make_stack, tools_dir, agent_rows(32), worker={**PATIENT, "lease_s": 2}, up=often)
    command = stack.sluice("run", "-c", str(stack.config_file), **KEYS)
    for at, victim in enumerate(VICTIMS):
        stack.wait(lambda now, at=at: now.trained >= 4 * at, f"{4 * at} to be trained")
        strike(stack, victim)
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    assert_each_trained_once(stack)
    wait_gone(stack.mark)
