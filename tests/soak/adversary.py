"""Delivers faults to a running stack.

- A fault waits until its victim is ready (`eager`: only until it is there), so the order is the plan's, whatever the
  machine's speed.
- What is stopped or down comes back by a timer: the next faults come meanwhile.
- A worker is stopped before it is killed, so that what it holds at its death is known exactly.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.stack import Stack
from tests.soak.battered_broker import BatteredBroker
from tests.soak.leases import Leases, look
from tests.soak.outsider import Outsider
from tests.soak.plan import Fault
from tests.soak.roles import Roles
from tests.soak.witness import Witness, strike

_VICTIM_S = 240.0  # a machine that does much else beside this takes its time to start a process
_BACK_S = 30.0
_HOLDS_S = 3.0
_SETTLE_S = 0.05  # what a stopped worker had sent arrives


class Adversary:
    """`deliver` one fault after the other, then `relent`."""

    def __init__(self, stack: Stack, broker: BatteredBroker, outsider: Outsider, witness: Witness) -> None:
        self._stack, self._broker, self._outsider, self._witness = stack, broker, outsider, witness
        self._roles = Roles(stack)
        self._timers: list[threading.Timer] = []
        self._broker_is_well = threading.Event()
        self._broker_is_well.set()

    def deliver(self, fault: Fault) -> str:
        """Returns what was hit, for the log."""
        if fault.verb == "poison":
            self._witness.recoveries.spoil()
            return self._outsider.bring_poison(fault.number)
        if fault.verb == "malformed":
            return self._outsider.bring_malformed(fault.number, fault.seed)
        if fault.verb == "junk":
            return self._outsider.bring_junk(fault.seed)
        if fault.role == "broker":
            return self._hit_the_broker(fault)
        name, pid = self._victim(fault)
        if fault.role == "worker":
            self._witness.recoveries.spoil()
        hit = f"{name} ({pid})"
        if fault.kind == "kill worker":
            hit += self._note_recovery(name, pid)
        if fault.verb == "kill":
            strike(pid, signal.SIGKILL)
            return hit
        strike(pid, signal.SIGSTOP)
        self._later(fault.hold_s, lambda: strike(pid, signal.SIGCONT))
        return f"{hit} for {fault.hold_s:.1f} s"

    def relent(self) -> None:
        """Returns when everything that was stopped goes on."""
        for timer in self._timers:
            timer.join()

    def close(self) -> None:
        """What was to come back does not."""
        for timer in self._timers:
            timer.cancel()

    def _hit_the_broker(self, fault: Fault) -> str:
        assert self._broker_is_well.wait(_BACK_S), "the broker did not come back from the fault before"
        self._broker_is_well.clear()
        self._witness.recoveries.spoil()
        blow, heal = (
            (self._broker.kill, self._broker.start)
            if fault.verb == "kill"
            else (self._broker.stall, self._broker.resume)
        )
        blow()
        self._later(fault.hold_s, lambda: self._broker_back(heal))
        return f"for {fault.hold_s:.1f} s"

    def _broker_back(self, heal: Callable[[], None]) -> None:
        heal()
        self._witness.recoveries.spoil()
        self._broker_is_well.set()

    def _note_recovery(self, name: str, pid: int) -> str:
        """Stop a worker, and let the clock of its jobs' recovery begin."""
        if not self._broker_is_well.is_set():
            strike(pid, signal.SIGSTOP)
            return " while the broker was away"
        others = self._roles.ready("worker") - {name}
        leases = self._stop_while_it_holds_jobs(name, pid)
        count = self._witness.recoveries.began(name, leases, clean=self._is_quiet(leases, others))
        return f" with {count} jobs"

    def _stop_while_it_holds_jobs(self, name: str, pid: int) -> Leases:
        """It may hold none when nothing moves just now: then it is stopped without."""
        until = time.monotonic() + _HOLDS_S
        while True:
            strike(pid, signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            with self._stack.client() as client:
                leases = look(client, self._stack.keys)
            if leases.of(name) or time.monotonic() > until:
                return leases
            strike(pid, signal.SIGCONT)
            time.sleep(_SETTLE_S)

    def _is_quiet(self, leases: Leases, others: set[str]) -> bool:
        """Another worker can take the jobs at once, and nothing else is in their way."""
        poison = self._outsider.poison & (leases.held.keys() | leases.waiting)
        alone = any(lease.alone for lease in leases.held.values())
        free = others and not any(_state(self._roles.pid(name)) in ("T", "gone") for name in others)
        return bool(free) and not poison and not alone

    def _victim(self, fault: Fault) -> tuple[str, int]:
        names = self._roles.names(fault.role)
        name = names[int(fault.pick * len(names))]
        until = time.monotonic() + _VICTIM_S
        while True:
            pid = self._roles.pid(name)
            if pid is not None and _state(pid) != "T" and (fault.eager or name in self._roles.ready(fault.role)):
                return name, pid
            assert time.monotonic() < until, f"{name} was not there to be hit: {fault}"
            time.sleep(0.05)

    def _later(self, delay_s: float, act: Callable[[], Any]) -> None:
        timer = threading.Timer(delay_s, act)
        self._timers.append(timer)
        timer.start()


def _state(pid: int | None) -> str:
    """R, S, T, … as the kernel has it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
