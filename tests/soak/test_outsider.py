"""What an outsider puts into a run's queue and streams: malformed jobs become dead letters, the rest is nobody's."""

from __future__ import annotations

from collections import Counter

from tests.chaos.blows import MANY, end_rows
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.soak.outsider import Outsider


def test_every_malformed_job_becomes_a_dead_letter_and_junk_in_a_stream_is_nobodys(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(MANY))
    outsider = Outsider(stack)
    command = stack.start("run")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    outsider.bring_malformed(1, seed=1)
    outsider.bring_junk(seed=1)
    stack.wait(lambda now: now.dead == len(outsider.ends), "a dead letter for each malformed one")
    end_rows(stack)
    assert command.wait(RUN_S) == 0, command.tail() + stack.report(stack.snapshot())
    now = stack.snapshot()
    assert sorted(stack.trained()) == sorted(stack.expected())
    assert now.reasons == Counter(f"dead:{reason}" for reason in outsider.ends.values()), stack.report(now)
    assert (now.trained, now.dropped, now.state) == (len(stack.rows), 0, "finished"), stack.report(now)
    assert not outsider.crater.exists(), "a pickle was loaded"
