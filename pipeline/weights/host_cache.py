"""What a host's processes share of versions: copies on its own disk, bounded in size, and what one has verified.

    <root>/<key>/            a whole version: filled elsewhere, renamed
    <root>/.<key>.lock       flock: shared while a process uses the version, exclusive while one fills or removes it;
                             its time is that of the last use; content: `synced`, or the boot of the host that filled it
    <root>/.<key>.<n>.tmp/   being filled, n bytes when done; nobody believes it, and its filler's death frees its lock

The kernel frees a dead process's locks, so a kill leaves nothing to repair. A version is used before it is synced, as
that may take as long as the rest; until then it counts for nothing after another boot. The directory must be on a disk
of this host.

A directory that all hosts read, such as the run's, is hashed by one of a host's processes, not by each (`Verified`):

    <root>/<key>    flock: whoever hashes; content: the directory, sizes and times of its files when they were right

A record holds for these files alone: another size, time or inode, another mount, another boot of the host, and it
counts for nothing. It ages too, so a worker that starts a day later reads every byte again. Files that changed so
shortly before they were read that their time might hide it get no record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.files import fsync_directory, fsync_tree, leave_to_disk
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import read_json

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


_KEY = re.compile(r"[0-9a-z-]{8,200}")
_ASIDE = re.compile(r"\.([0-9a-z-]{8,200})\.(\d{1,18})\.[0-9a-f]+\.tmp")
_LOOK_S = 0.05  # between two looks at a lock that another process holds
_SYNCED = b"synced"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class HostCache:
    """One process's view of the directory; its methods may be called from any thread, one at a time, `close` always."""

    def __init__(self, root: Path, most_bytes: int, *, wait_s: float) -> None:
        """`wait_s`: how long another process of this host may take to fill a version."""
        self._root, self._most, self._wait_s = root, most_bytes, wait_s
        self._held: dict[str, int] = {}  # key -> descriptor of its shared lock
        self._is_closed = False
        self._holding = threading.Lock()  # of these two; never kept while files are filled or synced

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
            self._hold(key, lock)
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
        with self._holding:
            for key in self._held.keys() - but:
                os.close(self._held.pop(key))
            kept = [(key, os.dup(lock)) for key, lock in self._held.items()]  # `close` may come while they are synced
        for key, lock in kept:
            try:
                if os.pread(lock, 64, 0) != _SYNCED:
                    with contextlib.suppress(OSError):  # a failing disk: it counts until the next boot
                        fsync_tree(self._root / key)
                        fsync_directory(self._root)
                        _write(lock, _SYNCED)
            finally:
                os.close(lock)

    def close(self) -> None:
        """This process uses no version any more, nor one that another thread is just getting."""
        with self._holding:
            self._is_closed = True
        self.release()

    def forget(self, key: str) -> None:
        """Remove a version that turned out to be damaged, unless another process uses it."""
        with self._holding:
            if (lock := self._held.pop(key, None)) is not None:
                os.close(lock)
        self._remove(key)

    def _hold(self, key: str, lock: int) -> None:
        with self._holding:
            if not self._is_closed:
                self._held[key] = lock
                return
        os.close(lock)
        raise WeightsError(f"{self._root / key}: who asked for it has ended meanwhile")

    def _fill(self, key: str, need: int, fill: Callable[[Path], None], lock: int) -> None:
        aside = self._root / f".{key}.{need}.{secrets.token_hex(4)}.tmp"
        try:
            with self._room():
                self._make_room(key, need)
                aside.mkdir()
            for path in self._versions():
                if path.name not in self._held:
                    leave_to_disk(path)
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
