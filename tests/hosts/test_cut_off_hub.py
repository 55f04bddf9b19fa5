"""The host of consumer, trainer and producer is cut off for longer than they own their roles, and let back."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.e2e.fixtures import detection_rows
from tests.e2e.stack import STOPPED
from tests.hosts.conftest import MakeHosts
from tests.hosts.host_stack import AHEAD, HUB, HostStack

pytestmark = pytest.mark.chaos
ROLES = ("consumer:0", "trainer")


def owners(stack: HostStack, which: str = "") -> list[bytes | None]:
    """Who plays each role now, None when its claim ran out; `:last`: who played it last."""
    with stack.client() as client:
        raw: Any = client
        return [raw.get(f"{stack.keys.owner}{role}{which}") for role in ROLES]


def test_producer_consumer_and_trainer_outlast_their_ownership(make_hosts: MakeHosts) -> None:
    """Cut off in both directions, then in one: what they send arrives, and they never learn what came of it."""
    stack = make_hosts(detection_rows(40), "one")
    worker, producer = stack.start_paused_run("one")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    first = owners(stack, ":last")  # their claims may run out for a moment on a busy machine
    assert None not in first
    stack.cut(HUB, "both")
    producer.signal(signal.SIGCONT)
    worker.signal(signal.SIGSTOP)  # what is enqueued from here on keeps the run from its end until the second cut
    stack.wait(lambda _: owners(stack) == [None, None], "both claims to run out")
    stack.network.mend()
    stack.wait(lambda _: owners(stack) == first, "both claims to be taken up again")
    stack.wait(lambda now: now.enqueued > AHEAD, "the producer to go on")
    stack.cut(HUB, "back")
    worker.signal(signal.SIGCONT)
    stack.wait(lambda _: owners(stack) == [None, None], "both claims to run out again")
    stack.network.mend()
    end = stack.finish()
    assert [process.popen.poll() for process in stack.processes if process is not worker] == [0, 0, 0]
    assert worker.popen.poll() == STOPPED
    assert owners(stack, ":last") == [
        (nonce or b"") + b":released" for nonce in first
    ]  # nobody had to play their roles
    assert (end.committed, end.dead) == (40, 0)
    stack.assert_exactly_once()
