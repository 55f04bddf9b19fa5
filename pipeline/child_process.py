"""Run a command that ends with its parent: `python -m sluice.pipeline.child_process PARENT_PID COMMAND…`.

Linux sends SIGTERM to the command when the parent dies, for any reason; on other systems the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LISTENER = "SLUICE_LISTENER"
"""Environment variable with the number of the listening socket that a supervisor opened for its child."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent does; exits if that has already happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:
            sys.exit(0)


def tethered(command: list[str]) -> list[str]:
    """The same command, tied to the calling process. Start it from the main thread."""
    return [sys.executable, "-P", "-m", "sluice.pipeline.child_process", str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
