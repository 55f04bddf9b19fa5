"""The processes of a supervised run, by the names that their supervisor gave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis

from sluice.pipeline.status.heartbeat import Heartbeat
from tests.e2e.processes import marked
from tests.e2e.stack import Stack

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
        workers = [f"worker-{number}" for number in range(config.worker.count)]
        consumers = [f"consumer-{number}" for number in range(config.consumer.count)]
        return [name for name in ("trainer", "producer", *consumers, *workers) if name.startswith(role)]

    def ready(self, role: str = "") -> set[str]:
        """Names of those that have started and loaded what they need; empty while the broker does not answer."""
        try:
            rows = self._stack.snapshot().processes
        except (redis.RedisError, OSError):
            return set()
        return {name for name, pid in self.pids(role).items() if _is_ready(rows, name, pid)}


def _is_ready(rows: Sequence[Heartbeat], name: str, pid: int) -> bool:
    return any(row.name == name and row.pid == pid and _LOADING not in (row.waiting_for or "") for row in rows)


def _name_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""  # it ended while we looked
    return next((entry.removeprefix(_NAME).decode() for entry in variables if entry.startswith(_NAME)), "")
