"""A worker that is paused longer than its stall timeout is replaced; the run goes on."""

from __future__ import annotations

import signal
import time

import pytest

from tests.chaos.blows import MANY, PATIENT, end_rows, is_stopped, pids_of, send
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos
STALL_S = 4.0


def stop_a_busy_worker(stack: Stack) -> list[int]:
    """SIGSTOP the run's worker at a moment when it holds leases; returns its process id."""
    until = time.monotonic() + RUN_S
    while True:
        pids = pids_of(stack, "worker")
        if stack.leased():
            send(pids, signal.SIGSTOP)
            if stack.leased() and all(map(is_stopped, pids)):
                return pids
            send(pids, signal.SIGCONT)
        assert time.monotonic() < until, stack.report(stack.snapshot())
        time.sleep(0.01)


def test_a_stalled_worker_does_not_end_the_run(make_stack: MakeStack) -> None:
    stack = make_stack(
        detection_rows(MANY),
        sampling={"max_new_tokens": 150},
        worker={**PATIENT, "stall_timeout_s": STALL_S, "checkpoint_tokens": 8},
        up={"restart_backoff_s": 0.1, "max_restarts": 50},  # on a busy machine others may stall as well
    )
    command = stack.start("run")
    pids = stop_a_busy_worker(stack)
    time.sleep(STALL_S + 1)
    send(pids, signal.SIGCONT)
    end_rows(stack)
    assert command.wait(RUN_S) == 0, command.tail() + stack.report(stack.snapshot())
    stack.assert_exactly_once()
