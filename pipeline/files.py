"""Files that are complete or absent: written elsewhere, synced, renamed."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sluice.pipeline.logs import get_logger

_STALE_S = 60.0
_SYNC_BYTES = 32 << 20  # between two syncs of a file that is being written


def write_atomic(
    path: Path,
    data: bytes | str,
    *,
    mode: int = 0o666,
    sweep: bool = True,
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Replace `path` with `data`; a reader sees the old or the new file, never a part.

    `mode` (narrowed by the umask) applies from the first byte on. `sweep` removes what killed writers of this path
    left, which lists the directory; without it, the caller does (`remove_stale`). `fence` is called right before the
    rename, and may raise to prevent it. Raises OSError, which names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # pids repeat across containers
    try:
        if sweep:
            for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                remove_stale(leftover)
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        fence()
        aside.replace(path)
    except OSError as error:
        if error.filename is None:  # of a write or a sync
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def tail(path: Path, num_bytes: int) -> str:
    """The end of a text file, however long it is. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(num_bytes).decode(errors="replace")


def is_unfinished(name: str) -> bool:
    """Whether `write_atomic` gives this name to a file that it hasn't finished."""
    return name.startswith(".") and name.endswith(".tmp")


def remove_stale(unfinished: Path) -> None:
    """Remove it if its writer must be dead: a young one may be another process's, even in another container."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - unfinished.stat().st_mtime > _STALE_S:
            unfinished.unlink()


def remove_unfinished(directory: Path, names: str) -> None:
    """Remove files and directories that match and were never renamed: whoever still writes them has lost its claim."""
    for unfinished in directory.glob(names):
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def remove_directory(directory: Path) -> None:
    """Delete it whole: from the first moment on it has another name, which `remove_unfinished` knows after a kill.

    A disk that refuses (NFS, while someone reads a file of it) is no reason to stop: `remove_unfinished` tries again.
    """
    aside = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}.tmp")
    try:
        directory.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        get_logger().warning("not deleted for now", path=str(directory), error=str(error))


def fsync_tree(directory: Path) -> None:
    """Make the files directly in a directory, and the directory itself, durable."""
    for path in directory.iterdir():
        if path.is_file():
            _fsync(path)
    _fsync(directory)


def leave_to_disk(directory: Path) -> None:
    """The host's memory needn't hold what is durable of its files. Call it before others are written.

    They get these pages then, instead of new ones, which a virtual machine may give ten times as slowly.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):  # removed meanwhile
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def synced_meanwhile(descriptor: int) -> Generator[Callable[[int], None]]:
    """A large file that is written in the block is synced as it is written, and durable after it.

    Call what it gives with the bytes of each write. Raises OSError if the disk doesn't take them.
    """
    unsynced, syncing = 0, Future[None]()
    syncing.set_result(None)
    with ThreadPoolExecutor(1, thread_name_prefix="sync") as pool:

        def wrote(count: int) -> None:
            nonlocal unsynced, syncing
            unsynced += count
            if unsynced >= _SYNC_BYTES and syncing.done():
                syncing.result()  # the kernel tells an error once
                unsynced, syncing = 0, pool.submit(os.fdatasync, descriptor)

        yield wrote
        syncing.result()
        os.fdatasync(descriptor)


def link_files(source: Path, target: Path) -> None:
    """Hard links to the files directly in `source`; copies where it's on another file system."""
    for file in sorted(source.iterdir()):
        if file.is_file():
            try:
                os.link(file.resolve(), target / file.name)  # the file itself: a hub cache holds relative links
            except OSError:
                shutil.copy2(file, target / file.name)


def fsync_directory(directory: Path) -> None:
    """Make renames inside a directory durable."""
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
