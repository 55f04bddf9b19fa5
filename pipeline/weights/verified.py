"""What this host has verified: a directory's files are hashed by one of its processes, not by each.

    <root>/<key>    flock: whoever hashes; content: the directory, sizes and times of its files when they were right

A record holds for these files alone: another size, time or inode, another mount, another boot of the host, and it
counts for nothing. It ages too, so a worker that starts a day later reads every byte again. Files that changed so
shortly before they were read that their time might hide it get no record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import read_json

_LOOK_S = 0.05  # between two looks at a lock that another process holds
_AGE_S = 3600.0
_TICK_NS, _COARSE_NS = 50_000_000, 2_000_000_000  # of a file's time; the second where there are whole seconds only
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_Stamp = tuple[str, int, int, int]  # name, bytes, modified (ns), inode


class _Record(msgspec.Struct):
    directory: str
    files: list[_Stamp]
    at: float  # seconds since the host's start


class Verified:
    """The records below `root`, a directory of this user; without one that it can write, every call checks."""

    def __init__(self, root: Path, *, wait_s: float) -> None:
        """`wait_s`: how long another process of this host may take to check a directory."""
        self._root, self._wait_s = root, wait_s

    def once(self, directory: Path, digest: str, names: Collection[str], check: Callable[[], None]) -> None:
        """Call `check` unless a process of this host has found these files right; raises what it raises.

        `digest`: what they must be; `names`: all files of the directory that it covers. Raises OSError for one that
        can't be read, WeightsError if another process takes too long.
        """
        with self._locked(directory, digest) as record:
            if record is None:
                check()
                return
            began_ns, before = time.time_ns(), _stamps(directory, names)
            if _holds(_read(record), before):
                return
            os.ftruncate(record, 0)
            check()
            if _stamps(directory, names) == before and _is_settled(before, began_ns):
                self._sweep()
                with contextlib.suppress(OSError):  # a full disk: the next process checks as well
                    found = _Record(str(directory.resolve()), before, time.clock_gettime(time.CLOCK_BOOTTIME))
                    os.pwrite(record, msgspec.json.encode(found), 0)

    @contextlib.contextmanager
    def _locked(self, directory: Path, digest: str) -> Generator[int | None]:
        """The record's file, this process's alone; None if there can't be one."""
        place = directory.stat()
        parts = (boot_id(), str(directory.resolve()), str(place.st_dev), str(place.st_ino), digest)
        file = self._root / xxh3_128("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._root.stat().st_uid != os.geteuid():
                raise PermissionError(f"{self._root} belongs to another user")
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            get_logger().warning("every process of this host hashes the weights itself", cause=str(error))
            yield None
            return
        try:
            self._wait(descriptor, directory)
            yield descriptor
        finally:
            os.close(descriptor)  # frees the lock, as a kill does

    def _wait(self, descriptor: int, directory: Path) -> None:
        until = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise WeightsError(
                        f"{directory}: another process of this host has been verifying it for more than "
                        f"{self._wait_s:.0f} s; is the disk slow? Raise weights.load_timeout_s"
                    ) from None
                time.sleep(_LOOK_S)

    def _sweep(self) -> None:
        """Remove the records of directories that are gone."""
        for file in self._root.iterdir():
            with contextlib.suppress(OSError, MessageError):
                if not Path(read_json(file.read_bytes(), _Record, "it").directory).is_dir():
                    file.unlink()


def boot_id() -> str:
    """Of the kernel: the same in all containers of a host, and another one after each boot."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return os.uname().nodename


def _stamps(directory: Path, names: Collection[str]) -> list[_Stamp]:
    found = [(name, (directory / name).stat()) for name in sorted(names)]
    return [(name, one.st_size, one.st_mtime_ns, one.st_ino) for name, one in found]


def _is_settled(files: list[_Stamp], began_ns: int) -> bool:
    """Whether a write after this moment shows in their times."""
    newest = max((modified for _, _, modified, _ in files), default=0)
    is_coarse = all(modified % 1_000_000_000 == 0 for _, _, modified, _ in files)
    return began_ns - newest > (_COARSE_NS if is_coarse else _TICK_NS)


def _read(record: int) -> _Record | None:
    with contextlib.suppress(MessageError):  # empty, or its writer was killed
        return read_json(os.pread(record, os.fstat(record).st_size, 0), _Record, "it")
    return None


def _holds(record: _Record | None, files: list[_Stamp]) -> bool:
    if record is None or record.files != files:
        return False
    return 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - record.at < _AGE_S
