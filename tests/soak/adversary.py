"""Delivers faults to a running stack, and ends them.

    fault (from the plan) ──deliver──▶ blow: whom it hit, how it heals ──timer──▶ healed

- A fault waits until its victim is ready (`eager`: only until it is there), so the order is the plan's, whatever the
  machine's speed.
- What holds is ended by a timer: the next faults come meanwhile. A host bears one fault of its network at a time.
- A worker is stopped before it is killed, so that what it holds at its death is known exactly.
"""

from __future__ import annotations

import functools
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.blows import is_stopped
from tests.deadlines import HANG_S, RUN_S
from tests.e2e.stack import Stack
from tests.hosts.clocks import clock
from tests.soak.battered_broker import BatteredBroker, ReplicatedBroker
from tests.soak.leases import Leases, look
from tests.soak.outsider import Outsider
from tests.soak.plan import DOOR_KINDS, KINDS, Fault, Needs
from tests.soak.roles import Roles
from tests.soak.site import Site
from tests.soak.witness import Witness, strike

_HOLDS_S = 3.0
_SETTLE_S = 0.05  # what a stopped worker had sent arrives
_BROKER, _RUN = "broker", "run"
_NETWORK = ("cut", "unplug", "unroute", "hang", "narrow", "delay")


@dataclass
class Blow:
    """A fault that was delivered. Times are of the monotonic clock."""

    fault: Fault
    names: frozenset[str]  # processes that it hit; "broker", or "run" for the disk of all
    hit: str  # for the log
    began: float
    heal: Callable[[], object] | None = None  # None: nothing is to end
    ended: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether it still holds."""
        return self.heal is not None and self.ended is None


class Adversary:
    """`deliver` one fault after the other, then `relent`. Without a site, faults of its kinds are skipped."""

    def __init__(
        self,
        stack: Stack,
        broker: BatteredBroker | ReplicatedBroker,
        outsider: Outsider,
        witness: Witness,
        site: Site | None,
    ) -> None:
        self._stack, self._broker, self._outsider, self._witness = stack, broker, outsider, witness
        self._site, self._roles = site, Roles(stack)
        self._timers: list[threading.Timer] = []
        self.blows: list[Blow] = []
        self.skipped: list[str] = []
        self.errors: list[BaseException] = []

    def deliver(self, fault: Fault) -> str:
        """Returns what was hit, for the log."""
        needs = (KINDS | DOOR_KINDS)[fault.kind].needs
        if reason := self._lacks(needs):
            self.skipped.append(fault.kind)
            return f"skipped: {reason}"
        blow = self._strike(fault)
        self.blows.append(blow)
        if self._may_delay_recovery(blow):
            self._witness.recoveries.spoil()
        if blow.heal is not None:
            self._later(fault.hold_s, lambda: self._end(blow))
            return f"{blow.hit} for {fault.hold_s:.1f} s"
        return blow.hit

    def _lacks(self, needs: Needs) -> str | None:
        if needs == "single":
            return "what others bring is brought to a single server" if self._broker.is_replicated else None
        return None if not needs else "one host for all" if self._site is None else self._site.lacks(needs)

    def relent(self) -> None:
        """Returns when everything that was stopped goes on."""
        for timer in self._timers:
            timer.join()
        assert not self.errors, self.errors

    def close(self) -> None:
        """What still holds ends at once."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for blow in self.blows:
            if blow.is_on:
                self._end(blow)

    def _strike(self, fault: Fault) -> Blow:
        began, brought = time.monotonic(), self._brought(fault)
        if brought is not None:
            names = frozenset(self._roles.names("worker")) if fault.verb == "poison" else frozenset[str]()
            return Blow(fault, names, brought, began)
        if fault.role in (_BROKER, _RUN):
            return self._hit_what_all_need(fault)
        name, pid = self._victim(fault)
        hit, began = f"{name} ({pid})", time.monotonic()
        heal: Callable[[], object] | None = None
        if fault.verb in ("kill", "clock", "starve"):
            if fault.role == "worker" and fault.verb != "starve":
                hit += self._note_recovery(name, pid)
            if fault.verb == "clock":
                hit += f", again under a clock {self._reset_clock(fault, name)}"
            if fault.verb == "starve":
                heal = self._starve(name)
            strike(pid, signal.SIGKILL)
        elif fault.verb == "stop":
            strike(pid, signal.SIGSTOP)
            heal = functools.partial(strike, pid, signal.SIGCONT)
        else:
            how, heal = self._harm_its_network(fault, name)
            hit += how
        return Blow(fault, frozenset([name]), hit, began, heal)

    def _brought(self, fault: Fault) -> str | None:
        """What comes from outside, if that is the fault."""
        if fault.verb == "poison":
            return self._outsider.bring_poison(fault.number)
        if fault.verb == "malformed":
            return self._outsider.bring_malformed(fault.number, fault.seed)
        return self._outsider.bring_junk(fault.seed) if fault.verb == "junk" else None

    def _hit_what_all_need(self, fault: Fault) -> Blow:
        """One of these at a time."""
        self._wait_healed(_BROKER)
        self._wait_healed(_RUN)
        began = time.monotonic()
        if fault.verb == "fill":
            disk = self._on_site.disks[fault.role]

            def free() -> None:
                disk.free()
                if fault.role == _BROKER:
                    self._broker.start_ended()

            disk.fill()
            return Blow(fault, frozenset([fault.role]), "its disk is full", began, free)
        broker = self._broker
        blow, heal = (broker.kill, broker.start) if fault.verb == "kill" else (broker.stall, broker.resume)
        blow()
        return Blow(fault, frozenset([_BROKER]), "", began, heal)

    def _harm_its_network(self, fault: Fault, name: str) -> tuple[str, Callable[[], None]]:
        self._wait_healed(name, _NETWORK)
        dice, site = random.Random(fault.seed), self._on_site
        network, host, broker = site.network, site.host_of(name), site.broker
        direction = dice.choice(("both", "there", "back"))
        if fault.verb == "cut":
            network.cut(host, broker, direction)
            return f" cut off, {direction}", lambda: network.join(host, broker)
        if fault.verb == "unplug":
            return " without its link", network.unplug(host)
        if fault.verb == "unroute":
            return " without a route", network.unroute(host, broker)
        if fault.verb == "narrow":
            kbit_s = dice.choice((32, 128, 512))
            return f" with {kbit_s} kbit/s", network.narrow(host, kbit_s)
        if fault.verb == "delay":
            delay_s = round(dice.uniform(0.05, 1.5), 2)
            return f" with {delay_s} s more each way", site.relay.delay(host.address, delay_s)
        return f" unheard, {direction}", site.relay.stall(host.address, direction)

    def _reset_clock(self, fault: Fault, name: str) -> str:
        apart = random.Random(fault.seed).choice(("+1h", "-1h", "+1d", "-40s"))
        self._on_site.fleet.seats[name].env = clock(apart)
        return apart

    def _starve(self, name: str) -> Callable[[], None]:
        """From its next start on it has too little memory to load; the kernel kills it, again and again."""
        seat, group = self._on_site.fleet.seats[name], self._on_site.memory_group(name)
        seat.group = group.path

        def feed() -> None:
            seat.group = None
            group.lift()

        return feed

    def _end(self, blow: Blow) -> None:
        heal, blow.ended = blow.heal, time.monotonic()
        if heal is not None:
            try:
                heal()
            except BaseException as error:
                self.errors.append(error)
                raise
            finally:
                blow.ended = time.monotonic()
        if self._may_delay_recovery(blow):
            self._witness.recoveries.spoil()

    def _may_delay_recovery(self, blow: Blow) -> bool:
        """A killed worker's own death is what is measured."""
        is_measured = blow.fault.kind in ("kill worker", "clock worker")
        hits = blow.fault.role in ("worker", _BROKER, _RUN) or blow.fault.verb == "poison"
        return hits and not is_measured

    def _note_recovery(self, name: str, pid: int) -> str:
        """Stop a worker, and let the clock of its jobs' recovery begin."""
        self._witness.recoveries.spoil()
        if self._is_on(_BROKER):
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
            while not is_stopped(pid) and time.monotonic() < until:
                time.sleep(0.001)
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
        free = others and not any(
            _state(self._roles.pid(name)) in ("T", "gone") or self._is_on(name) for name in others
        )
        return bool(free) and not poison and not alone and not self._is_on(_RUN)

    def _victim(self, fault: Fault) -> tuple[str, int]:
        names = self._roles.names(fault.role)
        name = names[int(fault.pick * len(names))]
        until = time.monotonic() + RUN_S
        while True:
            pid = self._roles.pid(name)
            if pid is not None and _state(pid) != "T" and (fault.eager or name in self._roles.ready(fault.role)):
                return name, pid
            assert time.monotonic() < until, f"{name} was not there to be hit: {fault}"
            assert not self.errors, self.errors
            time.sleep(0.05)

    @property
    def _on_site(self) -> Site:
        assert self._site is not None
        return self._site

    def _is_on(self, name: str, verbs: tuple[str, ...] = ()) -> bool:
        return any(b.is_on and name in b.names and (not verbs or b.fault.verb in verbs) for b in self.blows)

    def _wait_healed(self, name: str, verbs: tuple[str, ...] = ()) -> None:
        until = time.monotonic() + HANG_S
        while self._is_on(name, verbs):
            assert time.monotonic() < until, f"{name} did not come back from the fault before"
            time.sleep(0.05)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, act)
        self._timers.append(timer)
        timer.start()


def _state(pid: int | None) -> str:
    """R, S, T, … as the kernel has it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
