"""Small disks of one's own, to be filled: a tmpfs each."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_BLOCK = 1 << 16


class SmallDisk:
    """A tmpfs at a directory; `close` unmounts it."""

    def __init__(self, directory: Path, megabytes: int) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
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
        subprocess.run(["umount", "-l", str(self.directory)], capture_output=True, check=False)


def no_small_disks(directory: Path) -> str | None:
    """Why this machine has none; None if it has."""
    if os.geteuid() != 0:
        return "disks that can be filled need root: a tmpfs is mounted"
    try:
        SmallDisk(directory / "probe", 1).close()
    except OSError as error:
        return f"disks that can be filled: {error}"
    return None
