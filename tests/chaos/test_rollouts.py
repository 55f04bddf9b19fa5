"""Agent rollouts while processes die: worker, gateway, rollout server and producer, each in the middle of rollouts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.blows import MANY, PATIENT, end_rows, pids_of, send
from tests.e2e.agents import KEYS, agent_rows, agent_stack, assert_each_trained_once, tools_dir
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import wait_gone
from tests.e2e.stack import Stack

__all__ = ["tools_dir"]
pytestmark = pytest.mark.chaos
VICTIMS = ("worker", "gateway", "rollout-server", "produce")


def strike(stack: Stack, command: str) -> None:
    """SIGKILL to the process of a run that plays a role, while rollouts are open."""
    stack.wait(lambda now: now.open_rollouts, f"rollouts, before {command} is killed")
    send(pids_of(stack, command), signal.SIGKILL)


def test_killed_servers_and_workers_lose_and_repeat_no_rollout(make_stack: MakeStack, tools_dir: Path) -> None:
    often = {"max_restarts": 50, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2}
    stack = agent_stack(make_stack, tools_dir, agent_rows(MANY), worker={**PATIENT, "lease_s": 2}, up=often)
    command = stack.sluice("run", "-c", str(stack.config_file), **KEYS)
    for at, victim in enumerate(VICTIMS):
        stack.wait(lambda now, at=at: now.trained >= 4 * at, f"{4 * at} to be trained")
        strike(stack, victim)
    end_rows(stack)
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    assert_each_trained_once(stack)
    wait_gone(stack.mark)
