"""What an outsider puts into a run's queue and streams: malformed jobs become dead letters, the rest is nobody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pipeline.status import Snapshot
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack
from tests.soak.outsider import Outsider

ROWS = detection_rows(32)


def run_with(stack: Stack, bring: Callable[[], object]) -> Snapshot:
    """A whole run that something is brought into from outside."""
    command = stack.start("run")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    bring()
    assert command.wait(200) == 0, command.tail() + stack.report(stack.snapshot())
    assert sorted(stack.trained()) == sorted(stack.expected())
    return stack.snapshot()


def test_every_malformed_job_becomes_a_dead_letter(make_stack: MakeStack) -> None:
    stack = make_stack(ROWS)
    outsider = Outsider(stack)
    now = run_with(stack, lambda: outsider.bring_malformed(1, seed=1))
    expected = Counter(f"dead:{reason}" for reason in outsider.ends.values())
    assert now.reasons == expected, stack.report(now)
    assert not outsider.crater.exists(), "a pickle was loaded"


def test_junk_in_the_result_stream_is_dropped_and_not_counted(make_stack: MakeStack) -> None:
    stack = make_stack(ROWS)
    now = run_with(stack, lambda: Outsider(stack).bring_junk(seed=1))
    assert (now.enqueued, now.dead, now.dropped, now.state) == (len(ROWS), 0, 0, "finished"), stack.report(now)
