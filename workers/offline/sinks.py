"""Where finished answers go: a part file that a run can resume from, or standard output.

A part file has a header line, then one line per answer.

- The header records what the run was started with (input, model, options): only the same run can resume it.
- Only complete lines count. Everything from the first incomplete line on (an interrupted write) is dropped, and those
  sequences are decoded again.
- A line is handed to the OS as soon as it is appended, and is on disk a second later. Nothing is buffered, so a full
  disk is an error of the write, never of the close.
- One process at a time holds the file.

`Failures` explains in a few lines why rows ended in errors: the first error of each kind, and how many are like it.
Errors that differ only in names and numbers are of the same kind. Memory doesn't grow with the number of kinds.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import msgspec

from sluice.pipeline.errors import ConfigError, DataError, MessageError
from sluice.pipeline.wire.codec import read_json
from sluice.workers.offline.answers import MAX_N, MAX_ROWS, Answer, number_of, write_in_order

_MAX_KINDS = 3
_MAX_CHARACTERS = 500  # of one error
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[\d/.]\S*")
_SYNC_S = 1.0
_FORMAT = 1
_MAGIC = b'{"sluice_generate":'
_DIGESTS = ("input", "model")  # in the header; what they are taken of may change with the version


@dataclass
class _Kind:
    row: int  # the lowest
    text: str  # its error
    count: int = 0


@dataclass
class Failures:
    """The errors of a run."""

    _kinds: dict[str, _Kind] = field(default_factory=dict)
    _others: int = 0  # errors of further kinds

    def count(self, row: int, error: str) -> None:
        """Count one error of this row."""
        kind = _PARTICULAR.sub("#", error)
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._others += 1
            return
        found = self._kinds.setdefault(kind, _Kind(row, error))
        found.count += 1
        if row < found.row:
            found.row, found.text = row, error

    @property
    def first(self) -> str | None:
        """The error of the lowest row; None if there are none."""
        kinds = self._by_row()
        return _line(kinds[0]) if kinds else None

    def lines(self) -> list[str]:
        """One line per kind, by row, and one for all further kinds."""
        lines = [_line(kind) + (f"; {kind.count - 1} more" if kind.count > 1 else "") for kind in self._by_row()]
        return [*lines, f"other errors: {self._others}"] if self._others else lines

    def _by_row(self) -> list[_Kind]:
        return sorted(self._kinds.values(), key=lambda kind: kind.row)


def _line(kind: _Kind) -> str:
    text = " ".join(kind.text.split())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}…"
    return text if text.startswith(f"row {kind.row}: ") else f"row {kind.row}: {text}"


class _Header(msgspec.Struct, frozen=True):
    sluice_generate: int
    run: dict[str, Any]


class _Line(msgspec.Struct, frozen=True):
    """The fields needed to resume from an answer; others are skipped."""

    row: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROWS)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_N)]
    finish_reason: str
    num_new_tokens: int
    error: str | None = None


@dataclass
class Tally:
    """Counts over the whole run, including earlier sessions."""

    sequences: int = 0
    errors: int = 0
    tokens: int = 0
    loops: int = 0  # sequences ended by the repeat guard
    failures: Failures = field(default_factory=Failures)

    def count(self, answer: Answer | _Line) -> None:
        """Count one answer."""
        self.sequences += 1
        self.tokens += answer.num_new_tokens
        self.loops += answer.finish_reason == "repeat_terminated"
        if answer.finish_reason == "error":
            self.errors += 1
            self.failures.count(answer.row, answer.error or "an error without a message")


@dataclass
class Kept:
    """The valid part of a part file."""

    places: dict[int, int] = field(default_factory=dict)  # sequence number → offset of its line
    end: int = 0  # number of valid bytes
    tally: Tally = field(default_factory=Tally)


def header_line(run: dict[str, Any]) -> bytes:
    """The first line of a part file."""
    return msgspec.json.encode(_Header(_FORMAT, run)) + b"\n"


def recover(lines: Iterable[bytes], header: bytes, name: str) -> Kept:
    """The valid part of a part file's lines; `end` 0: nothing, not even the header.

    Raises ConfigError if the first line belongs to another run or isn't a header.
    """
    kept, stream = Kept(), iter(lines)
    first = next(stream, b"")
    if first != header:
        if first.endswith(b"\n") or not (first.startswith(_MAGIC) or _MAGIC.startswith(first)):
            raise ConfigError(_difference(first, header, name))
        return kept
    kept.end = len(first)
    for line in stream:
        try:
            found = read_json(line, _Line, "it") if line.endswith(b"\n") else None
        except MessageError:
            found = None
        if found is None:
            return kept
        number = number_of(found.row, found.index)
        if number not in kept.places:
            kept.places[number] = kept.end
            kept.tally.count(found)
        kept.end += len(line)
    return kept


class Sink(Protocol):
    """Where answers go."""

    tally: Tally

    def __contains__(self, number: int) -> bool:
        """True if this sequence was answered."""
        ...

    def __len__(self) -> int:
        """Number of answers it was given."""
        ...

    def append(self, answer: Answer, line: bytes) -> None:
        """Take one answer; `line` is what the output stores of it."""
        ...


class PartFile:
    """Open it with `with`; it stays on disk until `finish`, unless it holds no answer."""

    def __init__(self, path: Path, run: dict[str, Any], *, restart: bool = False) -> None:
        """Raises ConfigError for another run's part file, or one that another process is writing."""
        self.path = path
        self._restart = restart
        self._stream = _locked(path)
        try:
            header = header_line(run)
            if restart:
                self._stream.truncate(0)
            with open(self._stream.fileno(), "rb", closefd=False) as lines:
                kept = recover(lines, header, str(path))
            self._places, self._end, self.tally = kept.places, kept.end, kept.tally
            self._stream.truncate(self._end)
            self._stream.seek(self._end)
            self._synced = time.monotonic()
            if not self._end:
                self._write(header)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._places:
                self.path.unlink(missing_ok=True)
            else:
                with self._room(self.path):
                    os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def continued_by(self) -> str:
        """The command that continues; with --restart, it would empty the file again."""
        return "the same command without --restart" if self._restart and self._places else "the same command"

    def append(self, answer: Answer, line: bytes) -> None:
        """Store one answer. Raises DataError if the disk is full."""
        place = self._end
        self._write(line)
        self._places[answer.number] = place
        self.tally.count(answer)

    def lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """The lines of these answers, in this order."""
        with self.path.open("rb") as stream:
            for number in numbers:
                stream.seek(self._places[number])
                yield stream.readline()

    def finish(self, out: Path, numbers: Iterable[int]) -> None:
        """Write these answers to `out`, in this order; this file is deleted once it's closed.

        Raises DataError if the disk is full.
        """
        with self._room(out):
            write_in_order(out, self.lines(numbers))
        self._places.clear()

    def _write(self, line: bytes) -> None:
        with self._room(self.path):
            _write_all(self._stream, line)
            if time.monotonic() - self._synced >= _SYNC_S:
                os.fsync(self._stream.fileno())
                self._synced = time.monotonic()
        self._end += len(line)

    @contextmanager
    def _room(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            do = f"free some space; {self.continued_by} continues"
            raise DataError(f"{path}: {error.strerror or error}; {do}") from error


def _write_all(stream: IO[bytes], data: bytes) -> None:
    """A disk that is nearly full takes a part, and says so only when it is given the rest. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(stream.fileno(), left) :]


def _locked(path: Path) -> IO[bytes]:
    try:
        stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino != os.fstat(stream.fileno()).st_ino:
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError) as error:  # FileNotFoundError: its owner has just ended
        stream.close()
        raise ConfigError(f"{path}: another process writes it; wait for it to end or choose another --out") from error
    return stream


def _difference(first: bytes, header: bytes, name: str) -> str:
    try:
        found = read_json(first, _Header, "it")
    except MessageError:
        return f"{name}: not a part file of `sluice generate`; move it away, or replace it with --restart"
    old, new = found.run, read_json(header, _Header, "it").run
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)] or ["the format"]
    shown = ", ".join(
        f"{key} (or version of Sluice)" if key in _DIGESTS else f"{key} ({old.get(key)!r})" for key in names
    )
    return f"{name} was started with another {shown}; use the original command to continue, or --restart to start over"


def print_line(stdout: IO[bytes], line: bytes) -> None:
    """Raises DataError if standard output is a file on a full disk, BrokenPipeError if its reader has left."""
    try:
        _write_all(stdout, line)
    except BrokenPipeError:
        raise
    except OSError as error:
        do = "free some space, then run the command again"
        raise DataError(f"standard output: {error.strerror}; {do}") from error


class StdoutSink:
    """Keeps nothing, so a run can't be resumed from it."""

    def __init__(self, stdout: IO[bytes]) -> None:
        self._stdout = stdout
        self.tally = Tally()

    def __contains__(self, number: int) -> bool:
        return False

    def __len__(self) -> int:
        return self.tally.sequences

    def append(self, answer: Answer, line: bytes) -> None:
        """Print one answer; raises what `print_line` does."""
        print_line(self._stdout, line)
        self.tally.count(answer)
