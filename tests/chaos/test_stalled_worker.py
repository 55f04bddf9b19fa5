"""A worker that is paused longer than its stall timeout is replaced; the run goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.blows import PATIENT
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos
STALL_S = 1.0


def stop_a_busy_worker(stack: Stack) -> int:
    """SIGSTOP the run's worker at a moment when it holds leases; returns its pid."""
    until = time.monotonic() + RUN_S
    while not stack.leased():
        assert time.monotonic() < until, stack.report(stack.snapshot())
        time.sleep(0.01)
    [worker] = [row for row in stack.snapshot().processes if row.role == "worker"]
    os.kill(worker.pid, signal.SIGSTOP)
    return worker.pid


def test_a_stalled_worker_does_not_end_the_run(make_stack: MakeStack) -> None:
    stack = make_stack(
        detection_rows(24),
        sampling={"max_new_tokens": 150},
        worker={**PATIENT, "stall_timeout_s": STALL_S},
        up={"restart_backoff_s": 0.1, "max_restarts": 50},  # on a busy machine others may stall as well
    )
    command = stack.start("run")
    pid = stop_a_busy_worker(stack)
    time.sleep(3 * STALL_S)
    os.kill(pid, signal.SIGCONT)
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    stack.assert_exactly_once()
