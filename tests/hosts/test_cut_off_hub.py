"""The host of consumer, trainer and producer is cut off for longer than they own their roles, and let back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.fixtures import detection_rows
from tests.e2e.stack import STOPPED
from tests.hosts.conftest import MakeHosts
from tests.hosts.host_stack import HUB, HostStack

pytestmark = pytest.mark.chaos
ROLES = ("consumer:0", "trainer")


def owners(stack: HostStack, which: str = "") -> list[bytes | None]:
    """Who plays each role now, None when its claim ran out; `:last`: who played it last."""
    with stack.client() as client:
        raw: Any = client
        return [raw.get(f"{stack.keys.owner}{role}{which}") for role in ROLES]


def test_producer_consumer_and_trainer_outlast_their_ownership(make_hosts: MakeHosts) -> None:
    """Cut off in both directions, then in one: what they send arrives, and they never learn what came of it."""
    stack = make_hosts(detection_rows(16), "one")
    worker = stack.start_run("one")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    first = owners(stack, ":last")  # their claims may run out for a moment on a busy machine
    assert None not in first
    stack.cut(HUB, "both")
    stack.wait(lambda _: owners(stack) == [None, None], "both claims to run out")
    before = stack.snapshot().enqueued
    stack.network.mend()
    stack.wait(lambda _: owners(stack) == first, "both claims to be taken up again")
    stack.wait(lambda now: now.enqueued > before, "the producer to go on")
    stack.cut(HUB, "back")
    stack.wait(lambda _: owners(stack) == [None, None], "both claims to run out again")
    stack.network.mend()
    stack.wait(lambda _: owners(stack) == first, "both claims to be taken up a second time")
    end = stack.finish()
    assert worker.popen.poll() == STOPPED
    assert owners(stack, ":last") == [
        (nonce or b"") + b":released" for nonce in first
    ]  # nobody had to play their roles
    assert (end.committed, end.dead) == (len(stack.expected()), 0)
    stack.assert_exactly_once()
