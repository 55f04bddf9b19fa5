"""How the supervisor of a run ended, as a file in the run's directory: whoever looks later can say why nothing runs.

    start ──▶ start.json, locked while the supervisor lives ──▶ end.json

- `sluice run`, `up` and `demo` write both. A start without an end that nobody holds any more was killed.
- A second supervisor of a live run is refused; where two began at once, one leaves both files alone.
- There is neither if the roles were started by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.files import write_atomic

START, END, SUMMARY = "start.json", "end.json", "summary.json"
"""The files' names."""

_TRY_S, _TRY_EVERY_S = 0.5, 0.02  # a reader holds the lock for an instant


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start of one `sluice run`, `up` or `demo`."""

    schema_version: int = 1
    at: float  # Unix s
    command: str = ""  # continues the run, as one types it
    directory: str = ""  # where it was typed
    pid: int = 0  # of the supervisor


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one `sluice run`, `up` or `demo`."""

    schema_version: int = 1
    at: float  # Unix s; of a killed one, when its processes last wrote
    state: Literal[
        "complete", "stopped", "interrupted", "failed", "killed"
    ]  # stopped: at trainer.max_versions, or by evaluations
    exit_code: int = 0
    cause: str = ""  # of a failure: what the command said; of a stop: what the evaluations said
    kind: str = ""  # its class
    process: str = ""  # the process that it was, if it was one; its log is logs/<process>.log
    command: str = ""  # continues the run, as one types it
    directory: str = ""  # where it was typed

    @property
    def is_by_evaluations(self) -> bool:
        """Whether `eval.patience` ended it."""
        return self.state == "stopped" and self.cause != ""

    @property
    def is_halt(self) -> bool:
        """Whether the run was ended from outside, and continues when it is started again."""
        return self.state in ("interrupted", "killed")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a view without a broker shows of summary.json, the last snapshot: counts are sequences."""

    enqueued: int
    trained: int
    dead: int
    dropped: int
    latest_version: int | None = None
    end: RunEnd | None = None  # of the start that it belongs to


def run_directory(config: Config) -> Path:
    """Where the files of a run are."""
    return Path(config.run_dir) / config.run


class Supervision:
    """What the supervisor of a run holds while it lives: start.json, locked.

    Where the file can't be written or locked, nobody can tell whether a supervisor is alive; the run works without.
    """

    def __init__(self, directory: Path, start: RunStart) -> None:
        self._directory, self.start = directory, start
        self._file: int | None = None
        self._is_possible = True
        self._is_given_up = False
        self._found: dict[str, bytes | None] = {}  # the files of an earlier start, by name; None: there was none

    def __enter__(self) -> Self:
        if self.hold():
            self._find(END)
            with contextlib.suppress(OSError):
                (self._directory / END).unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def put_back(self) -> None:
        """Leave the files as this start found them and hold them no longer: it is refused, and the run is as it was."""
        self._is_given_up = True
        for name, content in self._found.items():
            if content is None:
                (self._directory / name).unlink(missing_ok=True)
            else:
                write_atomic(self._directory / name, content)

    def _find(self, name: str) -> None:
        self._found[name] = None
        with contextlib.suppress(OSError):
            self._found[name] = (self._directory / name).read_bytes()

    def hold(self) -> bool:
        """Whether the run's files are this supervisor's to write; False while another one is alive."""
        if self._is_given_up:
            return False
        if self._file is not None or not self._is_possible:
            return True
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = os.open(self._directory / START, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            self._is_possible = False
            return True
        until = time.monotonic() + _TRY_S
        while not (is_locked := _lock(file)) and is_locked is not None and time.monotonic() < until:
            time.sleep(_TRY_EVERY_S)
        if is_locked:
            self._file = file
            self._find(START)
            os.ftruncate(file, 0)
            os.write(file, msgspec.json.format(msgspec.json.encode(self.start)))
            return True
        os.close(file)
        if is_locked is None:  # a file system without locks
            self._is_possible = False
            (self._directory / START).unlink(missing_ok=True)
        return is_locked is None


def _lock(file: int) -> bool | None:
    """Take it if nobody has it; None if this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def refuse_second(directory: Path) -> None:
    """Raises ConfigError while a supervisor of this run lives: those of a second one would be processes of the same
    names, and stop with the first one's broker.
    """
    start = RunStart(at=0.0)
    try:
        file = os.open(directory / START, os.O_RDONLY)
    except OSError:
        return
    try:
        if _lock(file) is not False:
            return
        with contextlib.suppress(msgspec.MsgspecError):  # it is being written
            start = msgspec.json.decode(os.read(file, 1 << 20), type=RunStart)
    finally:
        os.close(file)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.at))
    facts = [f"`{start.command}`"] * bool(start.command) + [f"process {start.pid}"] * bool(start.pid)
    facts += [f"since {clock}"] * bool(start.at)
    raise ConfigError(
        f"run {directory.name} is running already ({', '.join(facts) or 'just started'}): see `sluice status "
        f"{directory}`; stop it there with Ctrl-C, or give this one a name of its own: --set run=NAME"
    )


def write_end(directory: Path, end: RunEnd) -> None:
    """Raises OSError."""
    write_atomic(directory / END, msgspec.json.format(msgspec.json.encode(end)))


def read_end(directory: Path) -> RunEnd | None:
    """None if it hasn't ended, or if there is none that this release can read."""
    try:
        return msgspec.json.decode((directory / END).read_bytes(), type=RunEnd)
    except FileNotFoundError:
        return _killed(directory)
    except (OSError, msgspec.MsgspecError):
        return None


def _killed(directory: Path) -> RunEnd | None:
    """The end of a supervisor that had no time to store one."""
    try:
        file = os.open(directory / START, os.O_RDONLY)
    except OSError:
        return None
    try:
        if not _lock(file):
            return None
        start = msgspec.json.decode(os.read(file, 1 << 20), type=RunStart)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(file)
    if (directory / END).exists():  # written in between
        return read_end(directory)
    return RunEnd(at=_last_write(directory, start.at), state="killed", command=start.command, directory=start.directory)


def _last_write(directory: Path, since: float) -> float:
    """When its processes last wrote a file, in Unix s."""
    last = since
    for path in (*directory.glob("logs/*.log"), *directory.glob("*.jsonl")):
        with contextlib.suppress(OSError):
            last = max(last, path.stat().st_mtime)
    return last


def read_summary(directory: Path, end: RunEnd) -> RunSummary | None:
    """The last snapshot of the start that ended so; None if there is none, or none that this release can read."""
    try:
        found = msgspec.json.decode((directory / SUMMARY).read_bytes(), type=RunSummary)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.end == end else None
