"""A supervised run that bears a plan of faults, and is then let come to its end.

    endure(plan) ─▶ finish: stop in order, cut the data at the epoch reached, start again, run to the end ─▶ verdict

The data last for ever until then, so the run is busy during every fault, however slow the machine is.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import redis

from sluice.pipeline.status.snapshot import Snapshot
from tests.e2e.fixtures import detection_rows
from tests.e2e.stack import Row, Stack
from tests.soak.adversary import Adversary
from tests.soak.battered_broker import BatteredBroker
from tests.soak.outsider import Outsider
from tests.soak.plan import Plan
from tests.soak.roles import Roles
from tests.soak.witness import Witness

ROWS = 20
SPOILT_ROW = 7  # its truth cannot be read: every sequence of it is dropped
LEASE_S = 3.0
KEEP_RESULT_S = 60.0  # longer than any fault: an answer that got lost is asked for again within it
_INTERRUPTED = 130
_START_S = 240.0
_STOP_S = 90.0
_SECTIONS: dict[str, dict[str, Any]] = {
    "data": {"epochs": 100_000},
    "model": {"trust_remote_code": True},
    "sampling": {"max_new_tokens": 100},
    "producer": {"group_size": 2, "max_in_flight": 32},
    "worker": {
        "lease_s": LEASE_S,
        "renew_s": 0.75,
        "stall_timeout_s": 30.0,
        "keep_result_s": KEEP_RESULT_S,
        "checkpoint_tokens": 8,
    },
    "up": {"max_restarts": 10_000, "restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
}


def soak_rows() -> list[Row]:
    """One epoch."""
    rows = detection_rows(ROWS)
    rows[SPOILT_ROW]["truth"] = "no list of objects"
    return rows


class SoakRun:
    """One run, its broker, what attacks it and what watches it."""

    def __init__(self, directory: Path, model: Path, *, workers: int, consumers: int) -> None:
        (directory / "broker").mkdir()
        self.broker = BatteredBroker(directory / "broker")
        self.broker.start()
        self.memory_before = self.broker.used_memory()
        self.stack = Stack(directory, self.broker.url, model, soak_rows(), "detection").configure(**_SECTIONS)
        self.stack.configure(worker={"count": workers}, consumer={"count": consumers})
        self.outsider = Outsider(self.stack)
        self.witness = Witness(self.stack, self.outsider.poison, Roles(self.stack).pid)
        self.adversary = Adversary(self.stack, self.broker, self.outsider, self.witness)
        self.log: list[str] = []
        self._began = time.monotonic()
        self._supervisor = self.stack.start("run")

    def endure(self, plan: Plan) -> None:
        """Every fault of the plan, in its order."""
        self.stack.wait(lambda now: now.trained > 0, "the first step", _START_S)
        self.witness.start()
        for fault in plan:
            time.sleep(fault.pause_s)
            assert self._supervisor.popen.poll() is None, "the run ended in the middle of the faults"
            at_s = self.wall_s()
            line = f"{at_s:7.1f} s  #{fault.number:<3} {fault.kind:<15} {self.adversary.deliver(fault)}"
            self.log.append(line)
            print(line, flush=True)
        self.adversary.relent()

    def finish(self, deadline_s: float) -> Snapshot:
        """Let it come to its end; everything that it started is gone then."""
        self._supervisor.signal(signal.SIGTERM)
        self._supervisor.expendable = True
        assert self._supervisor.wait(_STOP_S) == _INTERRUPTED, "it did not stop as one that is interrupted"
        with self.stack.client() as client:
            cursor: Any = client.hget(self.stack.keys.source, "cursor")
        self.stack.configure(data={"epochs": int(cursor.split(b":")[0]) + 1})
        self._supervisor = self.stack.start("run")
        assert self._supervisor.wait(deadline_s) == 0, "the run did not come to its end"
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
        self.adversary.close()
        self.stack.close()
        self.broker.kill()
        self.witness.end()
