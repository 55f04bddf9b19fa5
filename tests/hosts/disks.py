"""Small disks of one's own, to be filled: a tmpfs each.

Their source carries the pid of the test process, so that what a killed one left mounted is swept by the next.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_BLOCK = 1 << 16
_PREFIX = "sluice-test-"


class SmallDisk:
    """A tmpfs at a directory; `close` unmounts it."""

    def __init__(self, directory: Path, megabytes: int) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        source = f"{_PREFIX}{os.getpid()}"
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", source, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())
        self._filler = directory / "filler"

    def fill(self) -> None:
        """To the last byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (_BLOCK, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def free(self) -> None:
        """Take away what `fill` wrote."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Lazily: a process that still has a file open there does not hold it."""
        _unmount(str(self.directory))


def no_small_disks(directory: Path) -> str | None:
    """Why this machine has none; None if it has."""
    if os.geteuid() != 0:
        return "disks that can be filled need root: a tmpfs is mounted"
    try:
        _sweep()
        SmallDisk(directory / "probe", 1).close()
    except OSError as error:
        return f"disks that can be filled: {error}"
    return None


def _unmount(directory: str) -> None:
    subprocess.run(["umount", "-l", directory], capture_output=True, check=False)


def _sweep() -> None:
    for line in Path("/proc/mounts").read_text().splitlines():
        source, directory = line.split()[:2]
        if source.startswith(_PREFIX) and not Path("/proc", source.removeprefix(_PREFIX)).exists():
            _unmount(directory)
