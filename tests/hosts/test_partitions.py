"""The one worker is cut off, then heard by nobody: `status --why` names it, and the run goes on once that is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deadlines import RUN_S
from tests.e2e.fixtures import detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import STOPPED
from tests.hosts.conftest import MakeHosts
from tests.hosts.host_stack import BROKER, PORT, HostStack
from tests.hosts.relay import Relay

pytestmark = pytest.mark.chaos
RELAY_PORT = 6400


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for relay in made:
        relay.close()


def test_a_link_that_drops_and_a_one_way_stall_are_named_and_cost_nothing(
    make_hosts: MakeHosts, relays: list[Relay]
) -> None:
    stack = make_hosts(detection_rows(16), "one")
    broker, host = stack.network.hosts[BROKER], stack.network.hosts["one"]
    with broker.inside():
        relays.append(Relay(broker.address, RELAY_PORT, (broker.address, PORT)))
    near = (stack.broker_url or "").replace(f":{PORT}/", f":{RELAY_PORT}/")
    worker = stack.start_run("one", REDIS_URL=near)
    stack.wait(lambda now: now.trained >= 8, "a first step")
    for harm in (lambda: stack.network.unplug(host), lambda: relays[0].stall(host.address, "back")):
        bear(stack, worker, harm)
    end = stack.finish()
    assert worker.popen.poll() == STOPPED  # the whole run was its work alone
    assert (end.committed, end.dead) == (len(stack.expected()), 0)
    stack.assert_exactly_once()


def bear(stack: HostStack, worker: Process, harm: Callable[[], Callable[[], None]]) -> None:
    """Harm the worker's network until `status --why` has named it, then wait for its next work."""
    stack.wait(lambda now: worker.name in {row.name for row in now.alive("worker")}, "its heartbeat")
    heal = harm()
    stack.wait(lambda now: worker.name not in {row.name for row in now.alive("worker")}, "its heartbeats to be missed")
    said = stalled(stack)
    [stall] = [each for each in said["stalls"] if each["kind"] == "no_worker"]
    assert said["verdict"]["state"] == "stalled"
    assert stall["process"] == worker.name
    assert worker.name in stall["says"]
    assert "went silent" in stall["says"]
    assert "cut off" in stall["remedy"]
    before = stack.snapshot().committed
    heal()
    stack.wait(lambda now: now.committed > before, "the worker to go on")


def stalled(stack: HostStack) -> Any:
    """What `status --why` says once it calls the run stalled; who hears nothing is heard now and then."""
    until = time.monotonic() + RUN_S
    while True:
        asked = stack.start_on(BROKER, "status", "--why", "--json")
        asked.expendable = True
        if asked.wait() == 1:
            return json.loads(asked.text())
        assert time.monotonic() < until, asked.tail()
