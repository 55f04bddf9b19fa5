"""A run whose every role process has a host of its own; what ends is started again, as each host's supervisor would.

- Nobody ends the leases of a worker that died: they run out, as between hosts that only share a broker.
- A process can be started under another clock or within a memory limit; both hold from its next start on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deadlines import HANG_S
from tests.e2e.processes import BIN, Process, environment, launch
from tests.hosts.network import Host

_AGAIN_S = 0.2
_LOOK_S = 0.05
_HOPELESS = {2, 3, 5}  # configuration, data, model: a restart changes nothing
_GROUPS = Path("/sys/fs/cgroup/memory")
_PREFIX = "sluice-test-"


@dataclass
class Seat:
    """One process's name, its role and its host."""

    name: str
    role: str  # the sub-command
    host: Host
    env: dict[str, str] = field(default_factory=dict)
    group: Path | None = None  # a memory cgroup that it starts in
    process: Process | None = None
    starts: int = 0


class MemoryGroup:
    """A cgroup (version 1) with a memory limit; `close` removes it, once its processes are gone."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.path = _GROUPS / f"{_PREFIX}{os.getpid()}-{name}"
        self.path.mkdir(exist_ok=True)
        (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))

    def lift(self) -> None:
        """No limit any more."""
        with contextlib.suppress(OSError):
            (self.path / "memory.limit_in_bytes").write_text("-1")

    def kills(self) -> int:
        """How many of its processes the kernel has killed."""
        words = (self.path / "memory.oom_control").read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0

    def close(self) -> None:
        """Processes that are left move to the group above."""
        _remove(self.path)


def no_memory_groups() -> str | None:
    """Why this machine has none; None if it has."""
    try:
        _sweep()
        MemoryGroup("probe", 1 << 30).close()
    except OSError as error:
        return f"memory limits need root and cgroups of version 1: {error}"
    return None


def _remove(group: Path) -> None:
    until = time.monotonic() + HANG_S
    while group.exists():
        with contextlib.suppress(OSError):
            for pid in (group / "tasks").read_text().split():
                with contextlib.suppress(OSError):
                    (_GROUPS / "tasks").write_text(pid)
            group.rmdir()
        assert time.monotonic() < until, f"{group} could not be removed"
        time.sleep(0.02)


def _sweep() -> None:
    """What killed test processes left."""
    for group in _GROUPS.glob(f"{_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            _remove(group)


class Fleet:
    """`start` the seats, `stop` them in order; whatever ends in between is started again."""

    def __init__(self, seats: list[Seat], *, mark: str, directory: Path, config_file: Path) -> None:
        self.seats = {seat.name: seat for seat in seats}
        self._mark, self._directory, self._config_file = mark, directory, config_file
        self._ending = threading.Event()
        self._keeper: threading.Thread | None = None
        self.hopeless: list[str] = []

    def start(self, env: Callable[[Seat], Mapping[str, str]]) -> None:
        """All of them. `env`: what a process's environment has besides, such as the broker's address."""
        self._ending.clear()
        for seat in self.seats.values():
            self._launch(seat, env(seat))
        self._keeper = threading.Thread(target=self._keep, args=(env,), name="keeper", daemon=True)
        self._keeper.start()

    def is_over(self) -> bool:
        """Whether every process but the workers ended by itself, successfully."""
        return all(
            seat.process is not None and seat.process.popen.poll() == 0
            for seat in self.seats.values()
            if seat.role != "worker"
        )

    def stop(self, deadline_s: float) -> dict[str, int]:
        """SIGTERM to all that run; returns their exit codes."""
        self.end()
        processes = {name: seat.process for name, seat in self.seats.items() if seat.process is not None}
        running = {name: process for name, process in processes.items() if process.popen.poll() is None}
        for process in running.values():
            process.popen.terminate()
        return {name: process.wait(deadline_s) for name, process in running.items()}

    def end(self) -> None:
        """Start nothing more."""
        self._ending.set()
        if self._keeper is not None:
            self._keeper.join(HANG_S)
            self._keeper = None

    def tails(self) -> list[str]:
        """The ends of the logs."""
        return [seat.process.tail() for seat in self.seats.values() if seat.process is not None]

    def _keep(self, env: Callable[[Seat], Mapping[str, str]]) -> None:
        due: dict[str, float] = {}
        while not self._ending.wait(_LOOK_S):
            for name, seat in self.seats.items():
                code = None if seat.process is None else seat.process.popen.poll()
                if code in (None, 0):
                    continue
                if code in _HOPELESS:
                    self.hopeless.append(f"{name} ended with exit code {code}")
                due.setdefault(name, time.monotonic() + _AGAIN_S)
                if time.monotonic() >= due[name] and not self._ending.is_set():
                    del due[name]
                    self._launch(seat, env(seat))

    def _launch(self, seat: Seat, env: Mapping[str, str]) -> None:
        command = seat.host.command([str(BIN / "sluice"), seat.role, "-c", str(self._config_file)])
        if seat.group is not None:
            command = ["sh", "-c", f'echo $$ > {seat.group}/tasks; exec "$@"', "sh", *command]
        full = environment(self._mark, SLUICE_PROCESS_NAME=seat.name, **{**env, **seat.env})
        log = self._directory / "logs" / f"{seat.name}.log"
        seat.process = launch(command, name=seat.name, log=log, env=full, cwd=self._directory)
        seat.starts += 1
