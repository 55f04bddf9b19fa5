"""A worker that hangs over a job loses all its jobs, ends itself, and the culprit becomes a dead letter."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sluice.pipeline.errors import EngineError
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack
from tests.soak.leases import look
from tests.soak.spinning import asks_to_spin

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]
STALL_S = 3.0
_END_S = 270.0  # nine starts of a worker, one after the other
# Deaths among all neighbours, among suspects that halve, and alone before it is a dead letter.
SHARED, HALVINGS, SOLO = 2, 4, 1


def test_a_hung_worker_loses_its_jobs_and_the_culprit_is_buried(make_stack: MakeStack, spinning_model: Path) -> None:
    good = detection_rows(24)
    culprit = {"id": "culprit", "messages": asks_to_spin(), "truth": good[0]["truth"]}
    stack = make_stack(
        [*good[:4], culprit, *good[4:]],
        model={"path": str(spinning_model), "trust_remote_code": True},
        worker={"count": 2, "lease_s": 2, "stall_timeout_s": STALL_S, "max_attempts": SOLO},
        up={"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
    )
    [culprit_id] = {seq_id.rpartition(":")[0] for seq_id in stack.expected([culprit])}
    command = stack.start("run")
    holders = holders_of(culprit_id, stack, command)
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    now = stack.snapshot()
    assert (now.dead, now.reasons) == (1, {"dead:worker_deaths": 1}), stack.report(now)
    assert sorted(stack.trained()) == sorted(stack.expected(good))
    hangs = command.text().count(f"code={EngineError.exit_code}")
    assert len(holders) >= hangs  # a lease of 2 s may also expire where the machine is busy
    assert SHARED + SOLO <= hangs <= SHARED + HALVINGS + SOLO, f"{hangs} ended themselves as hung\n{command.tail()}"
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def holders_of(job_id: str, stack: Stack, command: Process) -> set[str]:
    """The nonces of all processes that held a job until the command ended."""
    seen: set[str] = set()
    until = time.monotonic() + _END_S
    with stack.client() as client:
        while command.popen.poll() is None:
            assert time.monotonic() < until, f"{sorted(seen)} held it so far\n{stack.report(stack.snapshot())}"
            leases = look(client, stack.keys)
            seen |= {lease.owner for held, lease in leases.held.items() if held == job_id}
            time.sleep(0.03)
    return seen
