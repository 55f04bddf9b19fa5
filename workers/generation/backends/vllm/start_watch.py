"""A deadline for the start of vLLM's core, which vLLM itself waits for without one.

- How long a start may take nobody knows (a large model loads for minutes), so what counts is a standstill: the new
  processes neither compute nor read for `limit_s`.
- Seen in practice where the core is forked from a process with threads: it inherits a lock that nobody will release.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil  # a requirement of vLLM

LIMIT_S = 60.0
_LOOK_S = 0.5
_IDLE_CPU_S = 0.05
"""What a process may use between two looks and still stand still: timers of libraries wake up now and then."""
_DUMP_S = 1.0
_DUMP = signal.SIGUSR2


class StartWatch:
    """Ends the processes that this one starts inside the `with`, if they stand still; then vLLM's own wait ends.

    After the `with`, `stalled` says what was seen, or is None.
    """

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        """`folder` takes the stacks of a forked core that stands still."""
        self._limit_s = limit_s
        self._stacks = folder / "stacks.txt"
        self._before: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sluice-vllm-start", daemon=True)
        self.stalled: str | None = None

    def __enter__(self) -> StartWatch:
        self._before = {process.pid for process in _descendants()}
        # A forked core inherits the handler with its open file.
        self._file = self._stacks.open("w+")
        faulthandler.register(_DUMP, self._file, all_threads=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.unregister(_DUMP)
        self._file.close()

    def _watch(self) -> None:
        """In a thread of its own: the caller's is blocked in vLLM."""
        work, moved_at = 0.0, time.monotonic()
        while not self._over.wait(_LOOK_S):
            new = [process for process in _descendants() if process.pid not in self._before]
            now = sum(_work(process) for process in new)
            # Fewer than before: one has ended, which is progress too.
            if not new or now > work + _IDLE_CPU_S or now < work:
                work, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > self._limit_s:
                self._end(new)
                return

    def _end(self, processes: list[psutil.Process]) -> None:
        self._dump(processes)
        seen = self._stacks.read_text(errors="replace").strip()
        self.stalled = f"its core stood still for {self._limit_s:g} s while it started" + (f":\n{seen}" if seen else "")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _dump(self, processes: list[psutil.Process]) -> None:
        """The stacks of those that inherited the handler; the others are killed anyhow."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, _DUMP)
        end = time.monotonic() + _DUMP_S
        while time.monotonic() < end and not self._over.wait(0.05):
            if self._stacks.stat().st_size:
                end = min(end, time.monotonic() + 0.2)


def _descendants() -> Iterator[psutil.Process]:
    yield from psutil.Process().children(recursive=True)


def _work(process: psutil.Process) -> float:
    """Seconds of processor time, and what was read, a second a gigabyte; 0 for one that is gone."""
    try:
        times = process.cpu_times()
        return times.user + times.system + process.io_counters().read_chars / 1e9
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0
