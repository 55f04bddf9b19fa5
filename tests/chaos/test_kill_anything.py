"""A supervised run whose processes are killed at random, about once a second."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.blows import MANY, PATIENT, end_rows, seeded
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import wait_gone

pytestmark = pytest.mark.chaos
KILLS = 4


def test_random_kills_lose_nothing(make_stack: MakeStack) -> None:
    dice = seeded()
    stack = make_stack(
        detection_rows(MANY),
        worker={**PATIENT, "lease_s": 2},
        up={"max_restarts": 50, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
    )
    command = stack.start("up", "--workers", "2")
    kills: list[str] = []
    until = time.monotonic() + RUN_S
    while len(kills) < KILLS:
        now = stack.snapshot()
        assert command.popen.poll() is None, command.tail()
        assert time.monotonic() < until, stack.report(now)
        if now.trained and now.processes:
            victim = dice.choice(now.processes)
            kills += [victim.name] if struck(victim.pid) else []
            print(f"{now.trained} trained: SIGKILL to {victim.name}")
        time.sleep(dice.uniform(0.5, 1.5))
    end_rows(stack)
    assert command.wait(RUN_S) == 0, command.tail() + stack.report(stack.snapshot())
    stack.assert_exactly_once()
    assert stack.snapshot().dead == 0
    logs = {log.stem for log in (stack.run_dir / "logs").glob("*.log")}
    assert logs == {"producer", "worker-0", "worker-1", "consumer-0", "trainer"}
    wait_gone(stack.mark)
    assert not stack.litter_that_stays()


def struck(pid: int) -> bool:
    """SIGKILL; False when it had ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
