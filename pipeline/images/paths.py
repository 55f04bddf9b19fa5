"""Image files below the configured roots.

- What counts is the real path: the file with all links resolved must be below a root with all links resolved.
- The resolved path is opened component by component without following links, so a link created in between opens
  nothing.
- Only regular files are opened; a FIFO or a device is never touched.
- What is wrong with a reference or its file is a RequestError; what is wrong with the host is a SourceUnavailable.
- An empty root counts as a mount point whose disk is away. In a root that isn't empty, a file that isn't there is
  missing. An absolute path is missing or not by its own root alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sluice.pipeline.errors import RequestError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# A retry gets these again: they are about the path. All others (EIO, ESTALE, EMFILE, …) are problems of the host.
_FINAL = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ENXIO,
        errno.ENODEV,
    }
)


class SourceUnavailable(RequestError):
    """The disk, mount or server of an image, or this host, has a problem; a later try may find the image."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        """`after_s`: how long a server asks to be left alone."""
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file below a root, as it was when found; equal while the file is unchanged."""

    root: str  # resolved
    inside: str  # its path below the root, without links
    mtime_ns: int
    size: int  # bytes


class Roots:
    """The directories of `images.roots`, resolved again at each call because links and mounts change."""

    def __init__(self, roots: Sequence[str], may_lack: str = "") -> None:
        """`may_lack`: the root that is created with its first file. If another is away, the host has a problem."""
        self._roots, self._may_lack = tuple(roots), may_lack

    def find(self, where: str, *names: str) -> Found:
        """The first of `names` that exists in the first root that has one. Blocks.

        Raises RequestError, SourceUnavailable if a root or the file can't be reached now.
        """
        if not self._roots:
            raise RequestError(f"{where}: reading image files is off; set images.roots in the configuration")
        if not all(map(_usable, names)):
            raise RequestError(f"{where}: a path must not have NUL characters or broken Unicode; rename the file")
        roots = [os.path.realpath(root) for root in self._roots]
        outside, reason, trouble = False, "no such file", ""
        for candidate in self._candidates(names):
            real = os.path.realpath(candidate)
            root = next((root for root in roots if os.path.commonpath((root, real)) == root), None)
            if root is None:
                outside = True
                continue
            try:
                return _found(root, real, os.stat(real, follow_symlinks=False), where)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                reason = error.strerror
                trouble = trouble or ("" if error.errno in _FINAL else f"{real}: {reason}")
        if outside:
            raise RequestError(
                f"{where}: is outside the configured roots; move the file, or add its directory to images.roots"
            )
        near = [at for at, root in enumerate(roots) if any(map(partial(_may_hold, root), names))]
        away = (_why_away(self._roots[at]) for at in near if self._roots[at] != self._may_lack)
        trouble = trouble or next((why for why in away if why), "")
        if trouble:
            raise SourceUnavailable(f"{where}: {trouble}; check the disk and the mounts of images.roots")
        raise RequestError(f"{where}: {reason} below images.roots; check the path and the worker's mounts")

    def read(self, found: Found, max_bytes: int, where: str) -> bytes:
        """The whole file, if it is still the one found. Blocks; raises RequestError, SourceUnavailable."""
        try:
            data, status = _read(_open(found), max_bytes, where)
        except OSError as error:
            raise _unreadable(error, where) from error
        real = os.path.join(found.root, found.inside)
        if _found(found.root, real, status, where) != found or len(data) != found.size:
            raise RequestError(f"{where}: changed while being read; write images under another name, then rename them")
        return data

    def _candidates(self, names: Sequence[str]) -> Iterator[str]:
        absolute = [name for name in names if os.path.isabs(name)]
        yield from absolute
        for root in self._roots:
            yield from (os.path.join(root, name) for name in names if name not in absolute)


def read_anywhere(path: str | os.PathLike[str], max_bytes: int, where: str) -> bytes:
    """A regular file that the caller names; links are followed. Blocks; raises RequestError."""
    try:
        _check_regular(os.stat(path), where)  # before opening it: opening a device may have side effects
        return _read(os.open(path, _FILE & ~os.O_NOFOLLOW), max_bytes, where)[0]
    except (OSError, ValueError) as error:  # ValueError: NUL in the path, or broken Unicode
        raise _unreadable(error, where) from error


def too_large(size: int, max_bytes: int, where: str) -> RequestError:
    """The error for an image of at least `size` bytes."""
    return RequestError(
        f"{where}: has at least {size} bytes, images.max_mb allows {max_bytes}; shrink the image or raise the limit"
    )


def _may_hold(root: str, name: str) -> bool:
    """Whether a file of this name would be below the resolved root."""
    return not os.path.isabs(name) or os.path.commonpath((root, os.path.realpath(name))) == root


def _why_away(root: str) -> str:
    """Why this root seems not to be mounted; empty if it is."""
    if not os.path.isdir(root):
        return f"{root} is not a directory"
    try:
        with os.scandir(root) as entries:
            return "" if next(entries, None) is not None else f"{root} is empty"
    except OSError:
        return ""


def _usable(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _unreadable(error: OSError | ValueError, where: str) -> RequestError:
    reason = getattr(error, "strerror", None) or error
    if isinstance(error, OSError) and error.errno not in _FINAL:
        return SourceUnavailable(f"{where}: cannot be read ({reason}); check the disk and the mounts of images.roots")
    return RequestError(f"{where}: cannot be read ({reason}); check the file and its permissions")


def _read(file: int, max_bytes: int, where: str) -> tuple[bytes, os.stat_result]:
    """At most `max_bytes` of a regular file, and its stat after the read; closes the descriptor."""
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(file)
        _check_regular(status, where)
        if status.st_size > max_bytes:
            raise too_large(status.st_size, max_bytes, where)
        data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise too_large(len(data), max_bytes, where)
        return data, os.fstat(file)


def _check_regular(status: os.stat_result, where: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{where}: is not a regular file (mode {stat.filemode(status.st_mode)}); name an image file")


def _found(root: str, real: str, status: os.stat_result, where: str) -> Found:
    _check_regular(status, where)
    return Found(root, os.path.relpath(real, root), status.st_mtime_ns, status.st_size)


def _open(found: Found) -> int:
    """A descriptor of the file, or OSError if a component of its path has become a link or is gone."""
    *folders, name = found.inside.split(os.sep)
    here = os.open(found.root, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        return os.open(name, _FILE, dir_fd=here)
    finally:
        os.close(here)
