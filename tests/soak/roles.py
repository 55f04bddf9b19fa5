"""The processes of a supervised run, by the names that their supervisor gave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import redis

from sluice.pipeline.status.heartbeat import Heartbeat
from tests.e2e.processes import marked
from tests.e2e.stack import Stack

_HEALTH_S = 0.5
_LOADING = " to load"
_NAME = b"SLUICE_PROCESS_NAME="


class Roles:
    """Looks at /proc, so that it also works while the broker is down."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def pids(self, role: str = "") -> dict[str, int]:
        """Name → pid of the role's processes that are there now, in order."""
        found = {_name_of(pid): pid for pid in sorted(marked(self._stack.mark))}
        return {name: found[name] for name in sorted(found) if name.startswith(role) and name in self.names(role)}

    def pid(self, name: str) -> int | None:
        """The process that has this name now."""
        return self.pids().get(name)

    def names(self, role: str = "") -> list[str]:
        """Names of the role's processes, whether they are there or not."""
        config = self._stack.config
        counts = {
            "consumer": config.consumer.count, "gateway": config.gateway.count,
            "rollout-server": config.rollout_server.count, "worker": config.worker.count,
        }  # fmt: skip
        numbered = [f"{name}-{number}" for name, count in counts.items() for number in range(count)]
        return [name for name in ("trainer", "producer", *numbered) if name.startswith(role)]

    def ready(self, role: str = "") -> set[str]:
        """Names of those that have started and loaded what they need; empty while the broker does not answer."""
        try:
            rows = self._stack.snapshot().processes
        except (redis.RedisError, OSError):
            return set()
        return {name for name, pid in self.pids(role).items() if self._is_ready(rows, name, pid)}

    def _is_ready(self, rows: Sequence[Heartbeat], name: str, pid: int) -> bool:
        role, _, number = name.rpartition("-")
        config = self._stack.config
        ports = {"gateway": config.gateway.port, "rollout-server": config.rollout_server.port}
        if role in ports:
            return _serves(ports[role] + int(number))
        return any(row.name == name and row.pid == pid and _LOADING not in (row.waiting_for or "") for row in rows)


def _serves(port: int) -> bool:
    """Whether it answers; the port is its supervisor's, and takes connections while nobody is behind it."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=_HEALTH_S).is_success
    except httpx.TransportError:
        return False


def _name_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""  # it ended while we looked
    return next((entry.removeprefix(_NAME).decode() for entry in variables if entry.startswith(_NAME)), "")
