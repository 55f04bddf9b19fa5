"""A supervised run that bears a plan of faults, and is then let come to its end.

    endure(plan) ─▶ finish: stop in order, cut the data at the epoch reached, start again, run to the end ─▶ verdict

The data last for ever until then, so the run is busy during every fault, however slow the machine is. On a site each
role has a host of its own; without one, `sluice run` supervises them all on this machine.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import redis

from sluice.pipeline.status.snapshot import Snapshot
from tests.deadlines import HANG_S, RUN_S
from tests.e2e.fixtures import detection_rows
from tests.e2e.stack import ENDLESS, STOPPED, Row, Stack
from tests.soak.adversary import Adversary
from tests.soak.battered_broker import BatteredBroker, ReplicatedBroker
from tests.soak.explanation import Asker
from tests.soak.outsider import TRAINED, Outsider
from tests.soak.plan import Fault
from tests.soak.roles import Roles
from tests.soak.site import Site
from tests.soak.witness import Witness

LEASE_S = 3.0
KEEP_RESULT_S = 60.0  # longer than any fault: an answer that got lost is asked for again within it
BrokerKind = Literal["single", "sentinel", "cluster"]
_INTERRUPTED = 130
_LEAST_PAUSE_S = 0.3
_SECTIONS: dict[str, dict[str, Any]] = {
    "data": ENDLESS,
    "worker": {
        "lease_s": LEASE_S,
        "renew_s": 0.75,
        "stall_timeout_s": 30.0,
        "keep_result_s": KEEP_RESULT_S,
        "checkpoint_tokens": 8,
    },
    "up": {"max_restarts": 10_000, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
}
_DETECTION: dict[str, dict[str, Any]] = {
    "model": {"trust_remote_code": True},
    "sampling": {"max_new_tokens": 100},
    "producer": {"group_size": 2, "max_in_flight": 32},
}
_ROWS = 20
_SPOILT_ROW = 7  # its truth cannot be read: every sequence of it is dropped


class _Supervised:
    """All roles under one `sluice run`."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._supervisor = stack, stack.start("run")

    def check(self) -> None:
        assert self._supervisor.popen.poll() is None, "the run ended in the middle of the faults"

    def stop(self) -> None:
        self._supervisor.signal(signal.SIGTERM)
        self._supervisor.expendable = True
        assert self._supervisor.wait(HANG_S) == _INTERRUPTED, "it did not stop as one that is interrupted"

    def complete(self, deadline_s: float) -> None:
        """Start again, and wait for the end."""
        self._supervisor = self._stack.start("run")
        assert self._supervisor.wait(deadline_s) == 0, "the run did not come to its end"


class _OnHosts:
    """Each role on a host of its own."""

    def __init__(self, stack: Stack, site: Site) -> None:
        self._stack, self._site = stack, site
        self._fleet = site.make_fleet(stack)
        self._start()

    def _start(self) -> None:
        self._fleet.start(lambda _: {"REDIS_URL": self._site.url})

    def check(self) -> None:
        assert not self._fleet.hopeless, self._fleet.hopeless

    def stop(self) -> None:
        self._stop(self._site.names)

    def complete(self, deadline_s: float) -> None:
        """Start again, and wait for the end; workers never end by themselves."""
        self._start()
        until = time.monotonic() + deadline_s
        while not self._fleet.is_over():
            self.check()
            assert time.monotonic() < until, "\n".join(["the run did not come to its end", *self._fleet.tails()])
            time.sleep(0.1)
        self._stop([name for name in self._site.names if name.startswith("worker")])

    def _stop(self, names: list[str]) -> None:
        starting = -signal.SIGTERM  # its handler was not there yet
        codes = self._fleet.stop(HANG_S)
        odd = {name: codes[name] for name in names if codes.get(name, 0) not in (0, STOPPED, starting)}
        assert not odd, "\n".join([f"they did not stop when they were asked to: {odd}", *self._fleet.tails()])


class SoakRun:
    """One run, its broker, what attacks it and what watches it.

    What it does is its caller's: `detection_soak` here, agents and clients of other packages in door.py.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        rows: list[Row],
        task: str,
        sections: dict[str, dict[str, Any]],
        *,
        site: Site | None = None,
        broker: BrokerKind = "single",
    ) -> None:
        self._site = site
        self.stack = Stack(directory, None, model, rows, task).configure(**_SECTIONS).configure(**sections)
        self.broker = self._make_broker(broker)
        self.memory_before = self.broker.used_memory()
        self.stack.broker_url = self.broker.url
        self.stack.configure(broker=self.broker.settings)
        if site is not None:
            # A broker that does not answer is given up soon enough to be asked again within a fault.
            self.stack.configure(broker={"socket_timeout_s": 2.0, "connect_timeout_s": 2.0})
        self.outsider = Outsider(self.stack)
        self.witness = Witness(self.stack, self.outsider.poison, Roles(self.stack).pid)
        self.adversary = Adversary(self.stack, self.broker, self.outsider, self.witness, site)
        self.asker = Asker(self.stack)
        self.log: list[str] = []
        self.faults_s = 0.0  # from the start of the first to that of the last
        self._began = time.monotonic()
        self._processes = _Supervised(self.stack) if site is None else _OnHosts(self.stack, site)

    def _make_broker(self, kind: BrokerKind) -> BatteredBroker | ReplicatedBroker:
        if self._site is not None:
            return (
                self._site.make_broker()
                if kind == "single"
                else self._site.make_replicated_broker(kind, self.stack.run)
            )
        assert kind == "single", "brokers that fail over are put on hosts of their own: that needs root"
        (self.stack.directory / "broker").mkdir()
        broker = BatteredBroker(self.stack.directory / "broker")
        broker.start()
        return broker

    def endure(self, plan: Sequence[Fault], for_s: float = math.inf) -> int:
        """Every fault of the plan, in its order; no further one after `for_s`. Returns how many there were."""
        self.stack.wait(lambda now: now.trained > 0, "the first step", RUN_S)
        self.witness.start()
        self.asker.start()
        began, done = time.monotonic(), 0
        until, due = began + for_s, began
        for fault in plan:
            due = max(due + fault.pause_s, time.monotonic() + _LEAST_PAUSE_S)
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() >= until:
                break
            self._processes.check()
            at_s = self.wall_s()
            line = f"{at_s:7.1f} s  #{fault.number:<3} {fault.kind:<15} {self.adversary.deliver(fault)}"
            self.log.append(line)
            print(line, flush=True)
            done += 1
            self.faults_s = time.monotonic() - began
        self.adversary.relent()
        self.asker.stop()
        return done

    def finish(self, deadline_s: float) -> Snapshot:
        """Let it come to its end; everything that it started is gone then."""
        self._processes.stop()
        self.stack.end_data()
        self._processes.complete(deadline_s)
        self.witness.stop()
        return self.stack.snapshot()

    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def report(self) -> str:
        """For a failing test: what was done, the state now, the ends of the logs."""
        try:
            now: object = self.stack.report(self.stack.snapshot())
        except (redis.RedisError, OSError) as error:
            now = f"the broker does not answer: {error}"
        return "\n".join(["faults so far:", *self.log, str(now)])

    def close(self) -> None:
        """End everything."""
        if self._site is not None:
            self._site.fleet.end()
        self.adversary.close()
        self.asker.end()
        self.stack.close()
        if self._site is None:
            self.broker.kill()
        self.witness.end()


def detection_soak(
    directory: Path, model: Path, *, workers: int, consumers: int, site: Site | None, broker: BrokerKind
) -> SoakRun:
    """Rows without end, one of them with a truth that cannot be read."""
    rows = detection_rows(_ROWS)
    rows[_SPOILT_ROW]["truth"] = "no list of objects"
    counts: dict[str, dict[str, Any]] = {"worker": {"count": workers}, "consumer": {"count": consumers}}
    return SoakRun(directory, model, rows, "detection", {**_DETECTION, **counts}, site=site, broker=broker)


def lots_of(run: SoakRun) -> dict[str, str]:
    """Sequence id → how it must end, of a detection soak and of what an outsider brought to it."""
    stack = run.stack
    lots = dict.fromkeys(stack.expected(), TRAINED)
    lots |= dict.fromkeys(stack.expected([stack.rows[_SPOILT_ROW]]), "invalid_truth")
    return lots | run.outsider.ends
