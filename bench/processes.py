"""The child processes of a benchmark: started, paused while the other side is measured, and always ended.

They are process groups of this session: should this process be killed while they are paused, the kernel wakes and
ends them (an orphaned group with a stopped member gets SIGHUP and SIGCONT).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from types import TracebackType

from sluice.pipeline.child_process import tethered
from sluice.pipeline.errors import DeadlineExceeded, SluiceError
from sluice.pipeline.run.supervisor import last_line

_GRACE_S = 5.0
_EXIT_S = 0.5  # from the end of a process's output to its exit code
_LINE_LIMIT = 1 << 26  # an answer of the bare engine is one line


class Fleet:
    """Processes of one kind, for the length of an `async with` block."""

    def __init__(self, kind: str, logs: Path) -> None:
        self._kind, self._logs = kind, logs
        self.processes: list[Process] = []

    async def start(self, command: list[str], env: dict[str, str] | None = None, *, piped: bool = False) -> Process:
        """Start one more; it writes its log to `<kind>-<number>.log`, and its answers there too unless piped."""
        name = f"{self._kind}-{len(self.processes)}"
        with self._log(len(self.processes)).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tethered(command), stdin=PIPE if piped else DEVNULL, stdout=PIPE if piped else log,
                stderr=log, env={**os.environ, **(env or {}), "SLUICE_PROCESS_NAME": name},
                process_group=0, limit=_LINE_LIMIT,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def pause(self) -> None:
        """Stop them in their tracks: an idle worker polls, and that is time of the other side."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._send(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Processor seconds that they have used so far (user and system); 0 where there is no /proc."""
        ticks = 0
        for process in self.processes:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """Raise SluiceError when one has ended."""
        for index, process in enumerate(self.processes):
            if process.returncode is not None:
                why = last_line(self._log(index))
                raise SluiceError(f"{self._kind}-{index} ended with {process.returncode}: {why}")

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """SIGTERM, and SIGKILL for what has not ended soon after."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        ends = asyncio.gather(*(process.wait() for process in self.processes))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ends), _GRACE_S)
        self._send(signal.SIGKILL)
        await ends

    async def answers(self, deadline_s: float) -> list[bytes]:
        """One line of each piped process; raises DeadlineExceeded, or SluiceError when one has ended instead."""
        reads = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        try:
            found = await asyncio.wait_for(asyncio.gather(*reads), deadline_s)
        except TimeoutError as error:
            self.check()
            raise DeadlineExceeded(f"a {self._kind} process said nothing for {deadline_s:.0f} s") from error
        if not all(found):
            await asyncio.sleep(_EXIT_S)
            self.check()
            raise SluiceError(f"a {self._kind} process closed its output")
        return found

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _log(self, index: int) -> Path:
        return self._logs / f"{self._kind}-{index}.log"
