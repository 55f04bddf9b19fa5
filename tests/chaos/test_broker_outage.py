"""The broker is away in mid-run, killed or stalled: every process waits for it, none ends, nothing is lost.

A minute with SLUICE_SOAK_FAULTS set (`make soak`); else seven seconds, which is longer than a lease, than a role's
claim and than the connections' time-outs here.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.chaos.blows import MANY, PATIENT, end_rows
from tests.e2e.fixtures import detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack
from tests.killable_broker import KillableBroker

_DOWN_S = 60.0 if os.environ.get("SLUICE_SOAK_FAULTS") else 7.0
_ROLES = ("produce", "consume", "worker", "worker")


def take_away(broker: KillableBroker, *, stalled: bool) -> None:
    if stalled:
        broker.signal(signal.SIGSTOP)
    else:
        broker.kill()


def give_back(broker: KillableBroker, *, stalled: bool) -> None:
    if stalled:
        broker.signal(signal.SIGCONT)
    else:
        broker.start()


def alive(stack: Stack) -> dict[str, tuple[int, float]]:
    """Process id and start of every role that says it is alive."""
    return {row.name: (row.pid, row.started) for row in stack.snapshot().processes}


def test_outages_of_the_broker_end_no_process_and_cost_nothing(tmp_path: Path, model_dir: Path) -> None:
    """It is killed, and later stalled."""
    data = tmp_path / "broker"
    data.mkdir()
    broker = KillableBroker(data)
    broker.start()
    stack = Stack(tmp_path, broker.url, model_dir, detection_rows(MANY), "detection")
    stack.configure(worker={**PATIENT, "lease_s": 2, "renew_s": 0.5}, sampling={"max_new_tokens": 60})
    stack.configure(broker={"socket_timeout_s": 3, "connect_timeout_s": 3})
    try:
        started = [stack.start(role) for role in _ROLES]
        names = {process.name for process in started}
        stack.wait(lambda now: now.committed >= 8 and names <= set(alive(stack)), "all but the trainer at work")
        started.append(stack.start("train"))  # last: without it the run cannot be over before all have started
        stack.wait(lambda now: now.trained and started[-1].name in alive(stack), "the first step")
        for stalled in (False, True):
            outlast(stack, broker, started, stalled=stalled)
        end_rows(stack)
        end = stack.finish()
        assert (end.dead, end.dropped) == (0, 0)
        stack.assert_exactly_once()
    finally:
        broker.signal(signal.SIGCONT)
        stack.close()
        broker.kill()


def outlast(stack: Stack, broker: KillableBroker, started: list[Process], *, stalled: bool) -> None:
    """One outage; every process is the same afterwards, and training goes on."""
    names, before, was = {process.name for process in started}, stack.snapshot(), alive(stack)
    take_away(broker, stalled=stalled)
    until = time.monotonic() + _DOWN_S
    while time.monotonic() < until:
        assert not [process.tail() for process in started if process.popen.poll() is not None]
        time.sleep(0.1)
    give_back(broker, stalled=stalled)
    stack.wait(lambda now: now.trained >= before.trained + 16, "training to go on")
    assert not [process.tail() for process in started if process.popen.poll() is not None]
    assert {name: alive(stack)[name] for name in names} == {name: was[name] for name in names}
