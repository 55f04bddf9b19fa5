"""Brokers that are killed, and that hang: one server, or several that fail over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import redis

from sluice.pipeline.broker.append_only import close_gaps
from tests.deadlines import HANG_S
from tests.failovers import Cluster, Failover
from tests.killable_broker import KillableBroker


class BatteredBroker(KillableBroker):
    """`appendfsync everysec` is the server's default; snapshots by RDB are off."""

    def __init__(self, directory: Path, **where: Any) -> None:
        super().__init__(directory, **where)
        self._log = directory.parent / "broker.log"  # not on a disk that is filled
        self._options += ["--save", "", "--logfile", str(self._log)]
        self._directory = directory

    is_replicated = False
    settings: ClassVar[dict[str, Any]] = {}
    """The section `broker` of a configuration."""

    def start(self) -> None:
        """On its own data; returns when it answers. Zeros that a full disk left in its file are taken out, as our own
        broker does."""
        super().start()
        if not self._answers_or_ends() and close_gaps(self._directory):
            super().start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until it answers; fails at the deadline."""
        until = time.monotonic() + HANG_S
        while not self._answers():
            assert time.monotonic() < until, f"the broker did not answer within {HANG_S:.0f} s:\n{self._last_lines()}"
            time.sleep(0.02)

    def _answers_or_ends(self) -> bool:
        """False: its process has ended by itself. Another fault may kill it meanwhile; that one starts it again."""
        until = time.monotonic() + HANG_S
        while time.monotonic() < until and not self._answers():
            if (process := self._process) is not None and process.poll() is not None and process is self._process:
                return False
            time.sleep(0.02)
        return True

    def _last_lines(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def stall(self) -> None:
        """SIGSTOP: it takes connections and answers nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def restart(self) -> None:
        """In order, with all its data."""
        assert self._process
        self._process.terminate()
        self._process.wait(HANG_S)
        self.start()

    def start_ended(self) -> None:
        """A single server lives on while its disk is full."""

    def used_memory(self) -> int:
        """Bytes."""
        return self._ask(lambda client: client.info("memory")["used_memory"])

    def _answers(self) -> bool:
        try:
            return self._ask(lambda client: client.ping())
        except redis.RedisError:
            return False

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:
            return question(client)


class ReplicatedBroker:
    """A primary and its replica, under Sentinels or in a cluster. What was the primary when it was hit is healed."""

    is_replicated = True

    def __init__(self, servers: Failover | Cluster) -> None:
        self._servers, self._hit = servers, servers.data_ports[0]
        self.url, self.settings = servers.url, servers.settings

    def kill(self) -> None:
        """SIGKILL to the primary; the replica takes over unless it is back before."""
        self._hit = self._primary()
        self._servers.signal(self._hit, signal.SIGKILL)

    def start(self) -> None:
        """Returns when both are in step."""
        self._servers.start_again(self._hit)
        self._in_step()

    def stall(self) -> None:
        """SIGSTOP to the primary: once it goes on, it may have been replaced and not know."""
        self._hit = self._primary()
        self._servers.signal(self._hit, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT; returns when both are in step."""
        self._servers.signal(self._hit, signal.SIGCONT)
        self._in_step()

    def start_ended(self) -> None:
        """Those that ended by themselves, as nodes of a cluster do that can't write what they know of it."""
        self._servers.start_ended()

    def used_memory(self) -> int:
        """Bytes, of the primary."""
        return int(self._servers.info(self._primary(), "memory")["used_memory"])

    def close(self) -> None:
        self._servers.close()

    def _in_step(self) -> None:
        self._servers.wait("the replica to be in step", self._is_in_step)

    def _is_in_step(self) -> bool:
        self._servers.start_ended()
        states = [self._servers.info(port) for port in self._servers.data_ports]
        followers = [state for state in states if state["role"] == "slave"]
        return len(followers) == 1 and followers[0]["master_link_status"] == "up"

    def _primary(self) -> int:
        self._in_step()
        return next(port for port in self._servers.data_ports if self._servers.role_of(port) == "master")
