"""A thread that looks at the broker all the time: leases and versions.

- Whoever holds a poison job is killed, once per process.
- No version number may ever have two digests, nor lose the one it has.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import redis

from tests.e2e.stack import Stack
from tests.soak.leases import Leases, look
from tests.soak.recovery import Recoveries

_LOOK_S = 0.03
_VERSIONS_S = 1.0


class Witness(threading.Thread):
    """`poison` is the ids of jobs that kill; `pid_of` finds a process by its name."""

    def __init__(self, stack: Stack, poison: set[str], pid_of: Callable[[str], int | None]) -> None:
        super().__init__(name="witness", daemon=True)
        self._stack, self._poison, self._pid_of = stack, poison, pid_of
        self.recoveries = Recoveries()
        self.newest = Leases(0.0, {}, frozenset())
        self.struck: dict[str, str] = {}  # nonce of a process that held poison → its job
        self.digests: dict[int, str] = {}
        self.contradictions: list[str] = []
        self.error: BaseException | None = None
        self._end = threading.Event()

    def run(self) -> None:
        due = 0.0
        while not self._end.wait(_LOOK_S):
            try:
                with self._stack.client() as client:
                    while not self._end.wait(_LOOK_S):
                        self._take(look(client, self._stack.keys))
                        self.error = None
                        if time.monotonic() > due:
                            self._compare(self._stack.digests())
                            due = time.monotonic() + _VERSIONS_S
            except (redis.RedisError, OSError) as error:
                self.error = error  # the broker is down, or its cluster: part of the plan, if it passes
            except BaseException as error:
                self.error = error
                raise

    def end(self) -> None:
        """Look no more."""
        self._end.set()
        if self.is_alive():
            self.join(30)

    def stop(self) -> None:
        """End; raises what ended the thread before."""
        self.end()
        if self.error:
            raise self.error

    def _take(self, leases: Leases) -> None:
        self.newest = leases
        self.recoveries.look(leases)
        for job in self._poison & leases.held.keys():
            lease = leases.held[job]
            if lease.owner not in self.struck:
                self.struck[lease.owner] = job
                self._strike(lease.worker)

    def _strike(self, worker: str) -> None:
        self.recoveries.spoil()
        pid = self._pid_of(worker)
        if pid is not None:
            strike(pid, signal.SIGKILL)

    def _compare(self, now: dict[int, str]) -> None:
        changed = {version for version, digest in self.digests.items() if now.get(version, digest) != digest}
        self.contradictions += [f"v{version}: {self.digests[version]}, then {now[version]}" for version in changed]
        self.digests |= now


def strike(pid: int, number: int) -> bool:
    """Send a signal; False when the process had ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
