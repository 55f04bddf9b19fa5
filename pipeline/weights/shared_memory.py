"""Versions in this host's shared memory: the trainer's newest, and those that its workers have loaded.

    /dev/shm/sluice-RUN-x1b2c3d4/     of one process
        owner                         locked while it lives
        v000012-DIGEST/               the files of a version that decide its weights

- A copy, and never the only one: whoever doesn't find it here (another host, a late joiner, a scorer that looks back)
  takes the durable one.
- A name holds the version's digest, and a reader computes that from the bytes before it uses them. So it need not trust
  the writer, and two trainers of one run can't disturb each other.
- A worker links the files into its own directory, which costs no memory: they stay for it as long as it needs them.
- What a killed process left is removed by the next one on this host, of whichever run: the kernel has freed its lock.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Generator, Iterator
from pathlib import Path

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.versions import deciding_files
from sluice.pipeline.wire.messages import WeightVersion

MEMORY = Path("/dev/shm")
_PREFIX = "sluice-"
_OWNER = "owner"
_NEWEST = 2  # versions of a trainer: the one that workers load, and the one that a slow one may not have linked yet
_UNOWNED_S = 60.0  # a directory without the owner's file is of a process that just starts, or died as it did
_SPARE = 64 << 20  # bytes left to others: queues of vLLM and torch lie there too


class Segments:
    """The versions of one process; removed when it ends. Any thread may call it."""

    def __init__(self, root: Path, run: str) -> None:
        """`root`: a tmpfs. Nothing is made before it is needed."""
        self._root, self._run = root, run
        self._directory: Path | None = None
        self._owner = -1  # descriptor of the lock
        self._making = threading.Lock()
        self._is_closed = False

    def copy(self, source: Path) -> Path:
        """The files of `source` that decide its weights, not shown to readers yet.

        Unlinks all but the newest versions first. Raises WeightsError if there is too little room, or OSError.
        """
        directory, files = self._own(), deciding_files(source)
        for old in self._versions()[: 1 - _NEWEST]:
            shutil.rmtree(old, ignore_errors=True)
        needed, room = sum(file.stat().st_size for file in files), os.statvfs(directory)
        if needed + _SPARE > (free := room.f_bavail * room.f_frsize):
            raise WeightsError(
                f"{self._root}: a version needs {needed >> 20} MiB, and {max(0, free - _SPARE) >> 20} MiB are free; "
                f"give it room for {_NEWEST + 1} versions (a container's --shm-size), or use another weights.transport"
            )
        with _aside(directory) as aside:
            for file in files:
                shutil.copyfile(file, aside / file.name)
            return aside

    def show(self, copy: Path, manifest: WeightVersion) -> None:
        """Make a copy this version, for readers."""
        target = self._own() / _name(manifest)
        if target.exists():  # published again: the same weights
            shutil.rmtree(copy, ignore_errors=True)
            os.utime(target)
        else:
            copy.rename(target)

    def find(self, manifest: WeightVersion) -> Iterator[Path]:
        """The copies of a version that this user's processes show on this host; one may vanish at any time."""
        if not manifest.shards:  # of an older release
            return
        for found in sorted(self._root.glob(f"{_PREFIX}{glob.escape(self._run)}-*/{_name(manifest)}")):
            with contextlib.suppress(OSError):
                if found.parent.stat().st_uid == os.geteuid():  # nobody else can change it after a check
                    yield found

    def link(self, found: Path, names: Collection[str]) -> Path:
        """These files of it under a name that only this process removes. Raises FileNotFoundError if they have
        vanished, or another OSError."""
        directory = self._own()
        target = directory / found.name
        if not target.exists():
            with _aside(directory) as aside:
                for name in names:
                    os.link(found / name, aside / name)
                aside.rename(target)
        return target

    def drop(self, version: Path) -> None:
        """Unlink one of this process's versions."""
        if version.parent == self._directory:
            shutil.rmtree(version, ignore_errors=True)

    def keep(self, manifest: WeightVersion | None) -> None:
        """Unlink all but this version."""
        kept = _name(manifest) if manifest else None
        for version in self._versions():
            if version.name != kept:
                shutil.rmtree(version, ignore_errors=True)

    def remove(self, number: int) -> None:
        """Unlink a version of this number, if there is one."""
        for version in self._versions():
            if version.name.startswith(f"v{number:06d}-"):
                shutil.rmtree(version, ignore_errors=True)

    def close(self) -> None:
        """Unlink everything, also what another thread is just about to link. Safe to call twice."""
        with self._making:
            self._is_closed = True
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                os.close(self._owner)
                self._directory = None
                atexit.unregister(self.close)

    def _versions(self) -> list[Path]:
        """The one that was shown first comes first."""
        found = [] if self._directory is None else list(self._directory.glob("v*"))
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def _own(self) -> Path:
        with self._making:
            if self._is_closed:
                raise WeightsError(f"{self._root}: who asked for a version of {self._run} has ended meanwhile")
            while self._directory is None:
                sweep(self._root)
                directory = self._root / f"{_PREFIX}{self._run}-{secrets.token_hex(4)}"
                directory.mkdir(mode=0o700)
                owner = os.open(directory / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(owner, fcntl.LOCK_EX)
                if not (directory / _OWNER).exists():  # another process's sweep came between the two lines
                    os.close(owner)
                    continue
                self._directory, self._owner = directory, owner
                atexit.register(self.close)
            return self._directory


def sweep(root: Path) -> None:
    """Remove what this user's dead processes left."""
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is locked, or goes away by itself
            if not directory.is_dir() or directory.stat().st_uid != os.geteuid():
                continue
            try:
                owner = os.open(directory / _OWNER, os.O_RDONLY)
            except FileNotFoundError:
                if time.time() - directory.stat().st_mtime > _UNOWNED_S:
                    shutil.rmtree(directory)
                continue
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
                get_logger().info("removed what a killed process left in shared memory", directory=str(directory))
            finally:
                os.close(owner)


@contextlib.contextmanager
def _aside(directory: Path) -> Generator[Path]:
    """A directory that no reader sees; removed if the block raises."""
    aside = directory / f".{secrets.token_hex(8)}.tmp"
    aside.mkdir()
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _name(manifest: WeightVersion) -> str:
    return f"v{manifest.version:06d}-{manifest.digest}"
