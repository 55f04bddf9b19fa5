"""Versions on a host's own disk, shared by all its processes and bounded in size.

    <root>/<key>/            a whole version: filled elsewhere, renamed
    <root>/.<key>.lock       flock: shared while a process uses the version, exclusive while one fills or removes it;
                             its time is that of the last use; content: `synced`, or the boot of the host that filled it
    <root>/.<key>.<n>.tmp/   being filled, n bytes when done; nobody believes it, and its filler's death frees its lock

The kernel frees a dead process's locks, so a kill leaves nothing to repair. A version is used before it is synced, as
that may take as long as the rest; until then it counts for nothing after another boot. The directory must be on a disk
of this host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.files import fsync_directory, fsync_tree
from sluice.pipeline.weights.verified import boot_id

_KEY = re.compile(r"[0-9a-z-]{8,200}")
_ASIDE = re.compile(r"\.([0-9a-z-]{8,200})\.(\d{1,18})\.[0-9a-f]+\.tmp")
_LOOK_S = 0.05  # between two looks at a lock that another process holds
_SYNCED = b"synced"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class HostCache:
    """One process's view of the directory; its methods may be called from any thread, one at a time."""

    def __init__(self, root: Path, most_bytes: int, *, wait_s: float) -> None:
        """`wait_s`: how long another process of this host may take to fill a version."""
        self._root, self._most, self._wait_s = root, most_bytes, wait_s
        self._held: dict[str, int] = {}  # key -> descriptor of its shared lock

    def get(self, key: str) -> Path | None:
        """A version that is there; it stays until `release`. None if it isn't, or is just being filled or removed."""
        if not (self._root / _checked(key)).is_dir():
            return None
        if key not in self._held:
            lock = self._lock(key, fcntl.LOCK_SH)
            if lock is None:
                return None
            is_there = (self._root / key).is_dir()
            if not is_there or os.pread(lock, 64, 0) not in (_SYNCED, boot_id().encode()):
                os.close(lock)
                if is_there:
                    self._remove(key)
                return None
            self._held[key] = lock
        self._touch(key)
        return self._root / key

    def make(self, key: str, need: Callable[[], int], fill: Callable[[Path], None]) -> Path:
        """The version, filled by one process of this host; the others wait. It stays until `release`.

        `need`: bytes that filling takes at most; `fill` writes files into an empty directory. Raises WeightsError if
        there is no room, what they raise, and if another process takes too long.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            if (found := self.get(key)) is not None:
                return found
            self._root.mkdir(parents=True, exist_ok=True)
            lock = self._lock(key, fcntl.LOCK_EX)
            if lock is None:
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"{self._root / key}: another process of this host fetches it for more than {self._wait_s:.0f} "
                        "s; is the store slow? Raise weights.load_timeout_s"
                    )
                time.sleep(_LOOK_S)
                continue
            try:
                if not (self._root / key).is_dir():
                    self._fill(key, need(), fill, lock)
            finally:
                os.close(lock)

    def release(self, but: Collection[str] = ()) -> None:
        """This process uses no version any more except those of these keys, which are synced when it returns."""
        for key in [key for key in self._held if key not in but]:
            os.close(self._held.pop(key))
        for key, lock in self._held.items():
            if os.pread(lock, 64, 0) != _SYNCED:
                with contextlib.suppress(OSError):  # a failing disk: it counts until the next boot
                    fsync_tree(self._root / key)
                    fsync_directory(self._root)
                    _write(lock, _SYNCED)

    def forget(self, key: str) -> None:
        """Remove a version that turned out to be damaged, unless another process uses it."""
        if key in self._held:
            os.close(self._held.pop(key))
        self._remove(key)

    def _fill(self, key: str, need: int, fill: Callable[[Path], None], lock: int) -> None:
        aside = self._root / f".{key}.{need}.{secrets.token_hex(4)}.tmp"
        try:
            with self._room():
                self._make_room(key, need)
                aside.mkdir()
            fill(aside)
            _write(lock, boot_id().encode())
            aside.rename(self._root / key)
        except OSError as error:
            if error.errno not in _FULL:
                raise WeightsError(
                    f"{self._root}: can't be written ({error}); is weights.cache_dir all right?"
                ) from error
            raise WeightsError(f"{self._root}: the disk is full ({error.strerror}); {self._remedy(need)}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _make_room(self, key: str, need: int) -> None:
        """Least recently used versions go first, never one in use."""
        used = self._leftovers(key)
        kept = sorted((self._last_use(path.name), path.name, _bytes(path)) for path in self._versions())
        used += sum(size for _, _, size in kept)
        for _, name, size in kept:
            if used + need <= self._most and _free(self._root) >= need:
                return
            if self._remove(name):
                used -= size
        if used + need > self._most:
            raise WeightsError(
                f"{self._root}: a version of {_gb(need)} has no room beside the {_gb(used)} that are in use; raise "
                f"weights.cache_gb ({_gb(self._most)})"
            )
        if (free := _free(self._root)) < need:
            raise WeightsError(f"{self._root}: the disk is full ({_gb(free)} free); {self._remedy(need)}")

    def _leftovers(self, key: str) -> int:
        """Bytes that others will have filled; what dead ones left is removed."""
        pending = 0
        for path in self._root.glob(".*.tmp"):
            if not (match := _ASIDE.fullmatch(path.name)):
                shutil.rmtree(path, ignore_errors=True)  # a version that was being removed
            elif match[1] == key:
                shutil.rmtree(path, ignore_errors=True)  # we have its lock
            elif (lock := self._lock(match[1], fcntl.LOCK_EX)) is None:
                pending += int(match[2])
            else:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        return pending

    def _remove(self, key: str) -> bool:
        """False if it is in use."""
        if key in self._held or (lock := self._lock(key, fcntl.LOCK_EX)) is None:
            return False
        gone = self._root / f".{secrets.token_hex(8)}.gone.tmp"
        with contextlib.suppress(FileNotFoundError):
            (self._root / key).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        self._lock_file(key).unlink(missing_ok=True)
        os.close(lock)
        return True

    def _versions(self) -> Iterator[Path]:
        return (path for path in self._root.iterdir() if _KEY.fullmatch(path.name) and path.is_dir())

    @contextmanager
    def _room(self) -> Generator[None]:
        """One process of this host at a time counts bytes."""
        lock = os.open(self._root / ".room.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + self._wait_s
            while not _locked(lock):  # held for some renames and deletions
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"{self._root}: another process of this host makes room for more than {self._wait_s:.0f} s; is "
                        "it stopped, or the disk stuck?"
                    )
                time.sleep(_LOOK_S)
            yield
        finally:
            os.close(lock)

    def _lock(self, key: str, kind: int) -> int | None:
        """A descriptor; None if others hold it against us."""
        path = self._lock_file(key)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            except FileNotFoundError:
                pass  # removed with its version between the two calls
            os.close(lock)

    def _lock_file(self, key: str) -> Path:
        return self._root / f".{key}.lock"

    def _touch(self, key: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._lock_file(key))

    def _last_use(self, key: str) -> float:
        with contextlib.suppress(OSError):
            return self._lock_file(key).stat().st_mtime
        return 0.0

    def _remedy(self, need: int) -> str:
        return f"{_gb(need)} are needed: free some, lower weights.cache_gb, or give weights.cache_dir another disk"


def _write(lock: int, content: bytes) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, content, 0)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise WeightsError(f"{key!r} is no name of a cached version")
    return key


def _bytes(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        total = sum(file.stat().st_size for file in directory.iterdir())
    return total


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _gb(count: int) -> str:
    return f"{count / (1 << 30):.3g} GiB"
