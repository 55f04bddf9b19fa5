"""Starts role processes, restarts the ones that fail, and shuts them all down in order.

- One log file per process. A process that exits with 0 is done; any other exit is restarted with backoff.
- Failures in a row are counted, not those within some time: the backoff and a slow start would thin them out.
- Configuration, data and model errors are never restarted: the next start would fail the same way.
- An optional child ends nothing: it is restarted for ever, except after an error of that kind.
- A child's session ends with it: processes it started are killed before it is restarted, and at the stop.
- Children end with this process, even if it is killed.
- `on_death(child, pid)` is called for every non-zero exit; supervision never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.pipeline.child_process import LISTENER, tethered
from sluice.pipeline.config.types import UpConfig
from sluice.pipeline.errors import ConfigError, DataError, ModelError, SluiceError
from sluice.pipeline.files import tail
from sluice.pipeline.logs import get_logger

_FINAL: dict[int, type[SluiceError]] = {kind.exit_code: kind for kind in (ConfigError, DataError, ModelError)}

_HEAR_S, _HEAR_AT_STOP_S = 15.0, 2.0


@dataclass
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    failures: int = 0  # in a row: none of these processes stayed up for `up.restart_window_s`
    started: float = 0.0  # clock of its last start
    due: float = 0.0  # clock of the next start
    killed: int = 0  # pid of the process that the supervisor itself killed
    done: bool = False
    optional: bool = False
    listener: socket.socket | None = None  # handed to every process of it

    @property
    def pid(self) -> int | None:
        """Process id while it is running."""
        return self.process.pid if self.process and self.process.poll() is None else None


OnDeath = Callable[[Child, int], Awaitable[None]]


class Supervisor:
    """Owns the children of `sluice up`."""

    def __init__(
        self,
        config: UpConfig,
        log_dir: Path,
        env: dict[str, str],
        on_death: OnDeath | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.log_dir = config, log_dir
        self.env = env
        self.children: dict[str, Child] = {}
        self.deaths = 0
        self.failed: Child | None = None  # the one that ended the run
        self.cause = ""  # how it did
        self._on_death, self._told = on_death, set[asyncio.Task[None]]()
        self._clock = clock

    def add(
        self, name: str, command: Sequence[str], *, optional: bool = False, listener: socket.socket | None = None
    ) -> None:
        """Register a command under a name; `run` starts it. A listener is closed when it's of no more use."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{name}.log"
        self.children[name] = Child(name, list(command), log, optional=optional, listener=listener)

    async def run(self) -> None:
        """Keep the children running until cancelled; raises SluiceError if one keeps failing."""
        while True:
            for child in self.children.values():
                self._look_after(child)
            await asyncio.sleep(0.05)

    def kill(self, name: str) -> int:
        """SIGKILL one child (for drills); returns its pid."""
        pid = self.children[name].pid
        if pid is None:
            raise SluiceError(f"{name} is not running")
        self.children[name].killed = pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def start_again(self, name: str) -> None:
        """Restart a finished child that has more to do."""
        self.children[name].done = False

    async def stop(self, grace_s: Callable[[], Awaitable[float]] | None = None) -> None:
        """SIGTERM, then SIGKILL after the grace time; returns when all of them and their descendants are gone.

        `grace_s` is called once the SIGTERMs are sent; without it, `up.stop_grace_s` applies.
        """
        for task in self._told:
            task.cancel()
        running = [(child, child.process) for child in self.children.values() if child.process]
        for child in self.children.values():
            child.process = None
            if child.listener is not None:
                child.listener.close()
        if not running:
            return
        for _, process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic()
        until += await grace_s() if grace_s else self.config.stop_grace_s
        killed: list[tuple[Child, int]] = []
        for child, process in running:
            if not await _gone(process, until):
                get_logger().warning("killed after its grace period", pid=process.pid)
                child.killed = process.pid
                process.kill()
                process.wait()
                killed.append((child, process.pid))
            end_session(process.pid)
        if self._on_death:  # together: with a broker that is gone, each takes its whole time
            await asyncio.gather(*(_hear(self._on_death, *each, _HEAR_AT_STOP_S) for each in killed))

    def _look_after(self, child: Child) -> None:
        if child.done or self._clock() < child.due:
            return
        if child.process is None:
            self._start(child)
            return
        code = child.process.poll()
        if code is None:
            return
        pid, child.process = child.process.pid, None
        end_session(pid)
        if code == 0:
            child.done = True
            return
        if self._on_death:
            task = asyncio.ensure_future(_hear(self._on_death, child, pid))
            self._told.add(task)
            task.add_done_callback(self._told.discard)
        self._after_failure(child, code)

    def _start(self, child: Child) -> None:
        env = {**self.env, "SLUICE_PROCESS_NAME": child.name}
        handed: list[int] = []
        if child.listener is not None:
            handed = [child.listener.fileno()]
            env[LISTENER] = str(handed[0])
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                tethered(child.command), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=env, start_new_session=True, pass_fds=handed,
            )  # fmt: skip
        child.starts += 1
        child.started = self._clock()

    def _after_failure(self, child: Child, code: int) -> None:
        self.deaths += 1
        if code in _FINAL and child.optional:
            child.done = True
            if child.listener is not None:  # callers would wait for an answer
                child.listener.close()
            get_logger().warning("left out", process=child.name, why=last_reason(child.log))
            return
        if code in _FINAL:
            self.failed, self.cause = child, f"{child.name} stopped: {last_reason(child.log)}"
            raise _FINAL[code](self.cause)
        now = self._clock()
        child.failures = 1 if now - child.started > self.config.restart_window_s else child.failures + 1
        if child.failures > self.config.max_restarts and not child.optional:
            often = "once" if child.failures == 1 else f"{child.failures} times, last"
            self.failed, self.cause = child, f"{child.name} ended {often}{_how(code)}: {_why(child, code)}"
            raise SluiceError(f"{self.cause} (log: {child.log})")
        delay = self.config.restart_backoff_s * 2 ** min(child.failures - 1, 16)
        child.due = now + min(delay, self.config.restart_backoff_max_s)
        get_logger().warning("restarting", process=child.name, code=code, why=_why(child, code))


def _how(code: int) -> str:
    return "" if code == -signal.SIGKILL else f" with exit code {code}" if code >= 0 else f" with signal {-code}"


def _why(child: Child, code: int) -> str:
    """A killed process has written nothing about its end: the last line of its log is about something else."""
    return "killed (SIGKILL), perhaps for memory" if code == -signal.SIGKILL else last_reason(child.log)


def sluice_command(*arguments: str) -> list[str]:
    """`sluice ARGUMENTS…` with this Python; the working directory can't shadow its imports."""
    return [sys.executable, "-P", "-m", "sluice.pipeline.cli.main", *arguments]


_RAISED = re.compile(r"^(?:sluice(?:\.\w+)+: |(?:\w+\.)+(?=[A-Z]\w*(?:Error|Exception): ))")


def last_line(log: Path) -> str:
    """The newest non-empty line of a log file."""
    with contextlib.suppress(OSError):
        lines = [line for line in tail(log, 4000).splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return "no output"


def last_reason(log: Path) -> str:
    """The newest line of a log as a reason: an error's message, without the place of its class."""
    return _RAISED.sub("", last_line(log)).removeprefix("error: ")


def end_session(leader: int) -> None:
    """SIGKILL the rest of a session after its leader is gone; processes that left the session can't be found."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for entry in Path("/proc").glob("[0-9]*/stat"):  # other process groups of that session; none without /proc
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(entry.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(entry.parent.name), signal.SIGKILL)


async def _hear(on_death: OnDeath, child: Child, pid: int, most_s: float = _HEAR_S) -> None:
    try:
        async with asyncio.timeout(most_s):
            await on_death(child, pid)
    except Exception as error:  # whatever it is, the other children still need supervision
        get_logger().warning("could not report a death", process=child.name, pid=pid, error=repr(error))


async def _gone(process: subprocess.Popen[bytes], until: float) -> bool:
    while process.poll() is None:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.02)
    return True
