"""One real process of a test, and what is left of the ones that are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.deadlines import HANG_S, RUN_S

MARK = "SLUICE_TEST_MARK"
BIN = Path(sys.executable).parent

# What a shell starts in the background ignores SIGINT, and so would every child; one that is handled here is not
# inherited. Tests interrupt their processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Process:
    """A started command; its output goes to `log`."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    expendable: bool = False  # the test ends it by force, or expects it to fail

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also of a stopped process; returns when it is gone."""
        self.expendable = True
        self.popen.kill()
        self.popen.wait(HANG_S)

    def terminate(self, deadline_s: float = RUN_S) -> int:
        """SIGTERM; returns the exit code."""
        self.popen.terminate()
        return self.wait(deadline_s)

    def wait(self, deadline_s: float = RUN_S) -> int:
        """The exit code; fails with the log when the process goes on."""
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {deadline_s:.0f} s\n{self.tail()}") from None

    @property
    def failed(self) -> bool:
        """It ended by itself with an error that no test asked for."""
        return not self.expendable and self.popen.poll() not in (None, 0)

    def text(self) -> str:
        """Everything that it wrote."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """The end of its log, with its name."""
        return f"--- {self.name} (exit {self.popen.poll()})\n{self.text()[-1500:]}"


def launch(command: list[str], *, name: str, log: Path, env: dict[str, str], cwd: Path) -> Process:
    """Start a command in a session of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=env, cwd=cwd, start_new_session=True
        )
    return Process(name, popen, log)


def environment(mark: str, **changes: str) -> dict[str, str]:
    """This process's environment with a mark that all descendants carry, and nothing of Sluice's own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLUICE_", "REDIS_"))}
    return {**kept, MARK: mark, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **changes}


def marked(mark: str) -> dict[int, str]:
    """Processes with this mark in their environment: pid → command line. Zombies are gone."""
    needle, found = f"{MARK}={mark}".encode(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = command
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def wait_gone(mark: str, deadline_s: float = HANG_S) -> None:
    """Fails when processes with the mark are still there at the deadline."""
    until = time.monotonic() + deadline_s
    while left := marked(mark):
        assert time.monotonic() < until, f"processes are left: {left}"
        time.sleep(0.05)


def end_all(processes: list[Process], mark: str) -> None:
    """Kill what is left, descendants included."""
    for process in processes:
        if process.popen.poll() is None:
            process.kill()
    until = time.monotonic() + HANG_S
    while (left := marked(mark)) and time.monotonic() < until:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
