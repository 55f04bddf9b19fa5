"""A worker that hangs over a job loses all its jobs, ends itself, and the culprit becomes a dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.errors import EngineError
from sluice.pipeline.queue.live_jobs import JobEvent, parse_log
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import wait_gone
from tests.e2e.stack import Stack
from tests.soak.spinning import asks_to_spin

pytestmark = pytest.mark.chaos
STALL_S = 3.0
# Workers that it costs: among all neighbours, among suspects that halve, and alone before it is a dead letter.
SHARED, HALVINGS, SOLO = 2, 4, 1
WORKERS = 2


def test_a_hung_worker_loses_its_jobs_and_the_culprit_is_buried(make_stack: MakeStack, spinning_model: Path) -> None:
    good = detection_rows(24)
    culprit = {"id": "culprit", "messages": asks_to_spin(), "truth": good[0]["truth"]}
    stack = make_stack(
        [*good[:4], culprit, *good[4:]],
        model={"path": str(spinning_model), "trust_remote_code": True},
        worker={
            "count": WORKERS,
            "lease_s": RUN_S,  # so that a job is lost through its worker's own end alone, however busy the machine is
            "stall_timeout_s": STALL_S,
            "max_attempts": SOLO,
            "checkpoint_tokens": 1,  # no job that has stored a token is blamed for the end of its worker
        },
        up={"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
    )
    [culprit_id] = stack.expected([culprit])
    command = stack.start("run")
    assert command.wait() == 0, command.tail() + stack.report(stack.snapshot())
    now, losses = stack.snapshot(), losses_of_the_dead(stack)
    assert now.reasons == {"dead:worker_deaths": len(losses)}, stack.report(now)
    # On a busy machine a worker may also stand still before the first token of a good job that runs alone.
    assert {culprit_id} <= losses.keys() <= hung_alone(stack), stack.report(now)
    assert sorted(stack.trained()) == sorted(stack.expected(good) - losses.keys())
    hangs = losses[culprit_id]
    assert SHARED + SOLO <= len(hangs) <= SHARED + HALVINGS + SOLO, hangs
    assert all("no progress" in hang.detail for hang in hangs), hangs
    # Each hang ends its process, so what hung after the first ones was started again.
    assert command.text().count(f"code={EngineError.exit_code}") >= len(hangs) - WORKERS, command.tail()
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def losses_of_the_dead(stack: Stack) -> dict[str, list[JobEvent]]:
    """Per sequence that is a dead letter: the attempts that ended with their workers."""
    with stack.client() as client:
        raw: Any = client
        entries = [fields for _, fields in raw.xrange(stack.keys.dead)]
    logs = {decode(DeadLetter, fields[b"d"]).seq_id: parse_log(fields[b"l"]) for fields in entries}
    return {seq_id: [event for event in log if event.kind == "lost"] for seq_id, log in logs.items()}


def hung_alone(stack: Stack) -> set[str]:
    """Sequences that a worker had for itself when it stood still, by its own word."""
    logs = [log.read_text() for log in (stack.run_dir / "logs").glob("worker-*.log")]
    said = [line for text in logs for line in text.splitlines() if 'event="stalled' in line]
    known = stack.expected()
    found = [{seq_id for seq_id in known if seq_id.rpartition(":")[0] in line} for line in said]
    return {seq_id for held in found if len(held) == 1 for seq_id in held}
