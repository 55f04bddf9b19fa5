"""Workers killed and paused in the middle of their jobs."""

from __future__ import annotations

import pytest

from tests.chaos.blows import (
    MANY,
    NO_JOBS,
    PATIENT,
    end_rows,
    resume,
    stop_while_it_decodes,
    stop_while_it_holds_jobs,
)
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import STOPPED

pytestmark = pytest.mark.chaos


def test_a_killed_and_a_paused_worker_lose_nothing_and_commit_nothing_late(make_stack: MakeStack) -> None:
    stack = make_stack(
        detection_rows(MANY),
        sampling={"max_new_tokens": 150},
        worker={**PATIENT, "max_batch": 4, "lease_s": 2, "checkpoint_tokens": 8},
    )
    killed, paused = stack.start("worker"), stack.start("worker")
    # Else the one that is there first might leave nothing for the other.
    stack.wait(lambda now: [row.waiting_for for row in now.alive("worker")] == 2 * [NO_JOBS], "both to wait for jobs")
    for role in ("produce", "consume", "train"):
        stack.start(role)
    orphans = stop_while_it_holds_jobs(stack, killed)
    killed.kill()
    frozen = stop_while_it_decodes(stack, paused)
    survivor = stack.start("worker")
    stack.wait(lambda _: not {killed.name, paused.name} & set(stack.leased().values()), "the leases to end")
    assert stack.snapshot().redelivered_jobs >= len(orphans | frozen)
    resume(paused)
    stack.wait(lambda now: refused(paused.text()) >= 1, "the late attempts to be refused")
    end_rows(stack)
    end = stack.finish()
    stack.assert_exactly_once()
    assert end.committed == len(stack.rows)
    assert survivor.popen.poll() == STOPPED


def refused(log: str) -> int:
    return log.count("lease lost") + log.count("not committed")
