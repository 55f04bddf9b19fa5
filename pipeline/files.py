"""Files that are complete or absent: written elsewhere, synced, renamed."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from pathlib import Path

_STALE_S = 60.0


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Replace `path` with `data`; a reader sees the old or the new file, never a part.

    `mode` (narrowed by the umask) applies from the first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _sweep(path)
        aside.unlink(missing_ok=True)
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove leftovers of a killed process; its pid may be alive in another container."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _STALE_S:
                leftover.unlink()


def fsync_tree(directory: Path) -> None:
    """Make the files directly in a directory, and the directory itself, durable."""
    for path in directory.iterdir():
        if path.is_file():
            _fsync(path)
    _fsync(directory)


def fsync_directory(directory: Path) -> None:
    """Make renames inside a directory durable."""
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
