"""A worker's host is cut off in the middle of its work for longer than its leases, and let back."""

from __future__ import annotations

import pytest

from tests.e2e.fixtures import detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import STOPPED
from tests.hosts.conftest import MakeHosts
from tests.hosts.host_stack import HostStack

pytestmark = pytest.mark.chaos


def refused(worker: Process) -> int:
    """Late attempts of a worker: leases that it learned it had lost, results that the broker did not take."""
    return worker.text().count("lease lost") + worker.text().count("not committed")


def assert_still_the_same(stack: HostStack, worker: Process) -> None:
    """It runs, under the pid that it was started with, and says so."""
    rows = stack.wait(
        lambda now: worker.name in {row.name for row in now.alive("worker")}, f"{worker.name} to be heard of"
    ).processes
    assert worker.popen.poll() is None
    assert [row.pid for row in rows if row.name == worker.name] == [worker.popen.pid]


def test_a_worker_cut_off_in_both_directions_is_replaced_refused_and_goes_on(make_hosts: MakeHosts) -> None:
    stack = make_hosts(detection_rows(16), "one", "two")
    cut_off = stack.start_run("one")
    lost = stack.cut_while_it_holds_jobs("one", cut_off, "both")
    other = stack.start_on("two", "worker")
    assert taken_over(stack, cut_off, lost, 0) >= len(lost)
    wait_for_more(stack, "the other worker to go on")
    let_back(stack, cut_off)
    other.expendable = True
    assert other.terminate() == STOPPED
    wait_for_more(stack, "the one that was cut off to go on alone")
    end = stack.finish()
    assert cut_off.popen.poll() == STOPPED  # it was asked to, at the end: the rest of the run was its work alone
    assert (end.committed, end.dead) == (len(stack.expected()), 0)
    stack.assert_exactly_once()


def test_workers_cut_off_in_one_direction_replace_each_other(make_hosts: MakeHosts) -> None:
    """First what the one says is lost, then what the other is told."""
    stack = make_hosts(detection_rows(16), "one", "two")
    mute = stack.start_run("one")
    lost = stack.cut_while_it_holds_jobs("one", mute, "there")
    deaf = stack.start_on("two", "worker")
    assert taken_over(stack, mute, lost, 0) >= len(lost)
    let_back(stack, mute)
    while True:
        stack.cut_while_it_holds_jobs("two", deaf, "back")
        stack.wait(lambda _: not stack.held_by(deaf), "the other worker to take over")
        before = refused(deaf)
        stack.network.mend()
        stack.wait(lambda _, before=before: refused(deaf) > before or stack.held_by(deaf), "the worker to go on")
        if refused(deaf) > before:  # else a call that reached the broker had committed all that it held
            break
    assert_still_the_same(stack, deaf)
    end = stack.finish()
    assert (mute.popen.poll(), deaf.popen.poll()) == (STOPPED, STOPPED)
    assert (end.committed, end.dead) == (len(stack.expected()), 0)
    stack.assert_exactly_once()


def wait_for_more(stack: HostStack, cause: str) -> None:
    """Wait until more is committed than now."""
    before = stack.snapshot().committed
    stack.wait(lambda now: now.committed > before, cause)


def taken_over(stack: HostStack, worker: Process, lost: set[str], given: int) -> int:
    """Wait until none of these jobs is this worker's; returns how many more than `given` went to another one."""
    stack.wait(lambda _: not lost & stack.held_by(worker), "the other worker to take over")
    return stack.snapshot().redelivered_jobs - given


def let_back(stack: HostStack, worker: Process) -> None:
    """End the cut; what the worker brings from before it is refused, and the worker goes on."""
    before = refused(worker)
    stack.network.mend()
    stack.wait(lambda _: refused(worker) > before, "the late attempts to be refused")
    assert_still_the_same(stack, worker)
