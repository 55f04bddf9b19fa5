"""How the supervisor of a run ended, as a file in the run's directory: whoever looks later can say why nothing runs.

`sluice run`, `up` and `demo` write it when they end, and remove it when they start. There is none if the supervisor was
killed, or if the roles were started by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.files import write_atomic

END, SUMMARY = "end.json", "summary.json"
"""The files' names."""


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one `sluice run`, `up` or `demo`."""

    schema_version: int = 1
    at: float  # Unix s
    state: Literal["complete", "stopped", "interrupted", "failed"]  # stopped: at trainer.max_versions
    exit_code: int = 0
    cause: str = ""  # of a failure: what the command said
    kind: str = ""  # its class
    process: str = ""  # the process that it was, if it was one; its log is logs/<process>.log


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


def write_end(directory: Path, end: RunEnd) -> None:
    """Raises OSError."""
    write_atomic(directory / END, msgspec.json.format(msgspec.json.encode(end)))


def read_end(directory: Path) -> RunEnd | None:
    """None if there is none, or none that this release can read."""
    try:
        return msgspec.json.decode((directory / END).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None


def read_summary(directory: Path, end: RunEnd) -> RunSummary | None:
    """The last snapshot of the start that ended so; None if there is none, or none that this release can read."""
    try:
        found = msgspec.json.decode((directory / SUMMARY).read_bytes(), type=RunSummary)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.end == end else None


def forget_end(directory: Path) -> None:
    """The run is started again."""
    (directory / END).unlink(missing_ok=True)
