"""The jobs of a killed worker are taken by another one as soon as their lease has run out; nobody reports the death."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.status.snapshot import Snapshot
from tests.chaos.blows import stop_while_it_holds_jobs
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import ENDLESS, Stack
from tests.soak.leases import look
from tests.soak.recovery import ENOUGH, Recoveries

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif("SLUICE_SOAK_FAULTS" not in os.environ, reason="`make soak`; tests/chaos has killed workers"),
]
LEASE_S = 2.0
KILLS = ENOUGH
_SECTIONS: dict[str, dict[str, Any]] = {
    "data": ENDLESS,
    "sampling": {"max_new_tokens": 150},
    # Few enough for one worker, so that the other one always has room.
    "producer": {"max_in_flight": 8, "samples_per_version": 8},
    "worker": {"max_batch": 16, "lease_s": LEASE_S, "renew_s": 0.5},
}


def test_a_killed_workers_jobs_are_taken_within_lease_and_a_second(make_stack: MakeStack, model_dir: Path) -> None:
    stack = make_stack(detection_rows(20), **_SECTIONS)
    for role in ("produce", "consume", "train"):
        stack.start(role)
    recoveries = Recoveries()
    pair = [ready_worker(stack), ready_worker(stack)]
    for _ in range(KILLS):
        victim = pair.pop(0)
        stop_while_it_holds_jobs(stack, victim)
        bury(stack, victim, recoveries)
        pair.append(ready_worker(stack))
    print(json.dumps({"kills": KILLS, "lease_s": LEASE_S, "recovery": recoveries.summary()}))
    recoveries.assert_within(LEASE_S)
    assert recoveries.took(clean=True), "every recovery was disturbed"


def ready_worker(stack: Stack) -> Process:
    """A new worker that has loaded its engine."""
    worker = stack.start("worker")

    def is_ready(now: Snapshot) -> bool:
        return any(row.name == worker.name and " to load" not in (row.waiting_for or "") for row in now.processes)

    stack.wait(is_ready, f"{worker.name} to be ready")
    return worker


def bury(stack: Stack, victim: Process, recoveries: Recoveries) -> None:
    """Kill a stopped worker; returns when its jobs are in other hands."""
    with stack.client() as client:
        recoveries.began(victim.name, look(client, stack.keys), clean=True)
        victim.kill()
        until = time.monotonic() + RUN_S
        while recoveries.all[-1].took_s is None:
            assert time.monotonic() < until, f"nobody took {recoveries.all[-1]}\n{stack.report(stack.snapshot())}"
            time.sleep(0.01)
            recoveries.look(look(client, stack.keys))
