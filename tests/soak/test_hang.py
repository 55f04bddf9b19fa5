"""A worker that hangs over a job loses all its jobs, ends itself, and the culprit becomes a dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.errors import EngineError
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import wait_gone
from tests.e2e.stack import Stack
from tests.soak.spinning import asks_to_spin

pytestmark = pytest.mark.chaos
STALL_S = 3.0
# Deaths among all neighbours, among suspects that halve, and alone before it is a dead letter.
SHARED, HALVINGS, SOLO = 2, 4, 1


def test_a_hung_worker_loses_its_jobs_and_the_culprit_is_buried(make_stack: MakeStack, spinning_model: Path) -> None:
    good = detection_rows(24)
    culprit = {"id": "culprit", "messages": asks_to_spin(), "truth": good[0]["truth"]}
    stack = make_stack(
        [*good[:4], culprit, *good[4:]],
        model={"path": str(spinning_model), "trust_remote_code": True},
        # No job that has stored a token is blamed for the end of its worker.
        worker={"count": 2, "lease_s": 4, "stall_timeout_s": STALL_S, "max_attempts": SOLO, "checkpoint_tokens": 1},
        up={"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
    )
    [culprit_id] = stack.expected([culprit])
    command = stack.start("run")
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    now, dead = stack.snapshot(), buried(stack)
    assert now.reasons == {"dead:worker_deaths": len(dead)}, stack.report(now)
    # On a busy machine a worker may also stand still before the first token of a good job that runs alone.
    assert {culprit_id} <= dead.keys() <= hung_alone(stack), stack.report(now)
    assert sorted(stack.trained()) == sorted(stack.expected(good) - dead.keys())
    deaths, hangs = dead[culprit_id].attempts, command.text().count(f"code={EngineError.exit_code}")
    assert SHARED + SOLO <= deaths <= SHARED + HALVINGS + SOLO, f"{deaths} workers hung over it\n{command.tail()}"
    assert hangs >= deaths, f"{hangs} of them ended themselves\n{command.tail()}"
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def buried(stack: Stack) -> dict[str, DeadLetter]:
    """By sequence."""
    with stack.client() as client:
        raw: Any = client
        letters = [decode(DeadLetter, fields[b"d"]) for _, fields in raw.xrange(stack.keys.dead)]
    return {letter.seq_id: letter for letter in letters}


def hung_alone(stack: Stack) -> set[str]:
    """Sequences that a worker had for itself when it stood still, by its own word."""
    logs = [log.read_text() for log in (stack.run_dir / "logs").glob("worker-*.log")]
    said = [line for text in logs for line in text.splitlines() if 'event="stalled' in line]
    known = stack.expected()
    found = [{seq_id for seq_id in known if seq_id.rpartition(":")[0] in line} for line in said]
    return {seq_id for held in found if len(held) == 1 for seq_id in held}
