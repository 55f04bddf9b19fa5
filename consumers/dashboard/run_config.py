"""The configuration that the run was made with, where it left one; that of this dashboard's own start otherwise.

- Read again when the file changes: a run that starts again may have another configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from consumers.audit.run_files import RESOLVED, stored_config
from pipeline.config.types import Config
from pipeline.errors import ConfigError

_OWN = "as this dashboard was started with"


class Resolved(NamedTuple):
    """`origin` ends the sentence "These values are shown …"."""

    config: Config
    origin: str


class RunConfig:
    """Safe to use from many threads; at worst two of them read at once."""

    def __init__(self, given: Config) -> None:
        self._given = given
        self._directory = Path(given.run_dir) / given.run
        self._seen: tuple[tuple[int, int], Resolved] | None = None

    def read(self) -> Resolved:
        """Blocking; never raises."""
        try:
            status = (self._directory / RESOLVED).stat()
        except OSError:
            return Resolved(self._given, f"{_OWN}: the run left no {RESOLVED} here")
        stamp = status.st_mtime_ns, status.st_size
        if self._seen is None or self._seen[0] != stamp:
            self._seen = stamp, self._load()
        return self._seen[1]

    def _load(self) -> Resolved:
        try:
            found = stored_config(self._directory, self._given, ())
        except ConfigError as error:
            return Resolved(self._given, f"{_OWN}: the run's own cannot be read ({error})")
        return Resolved(found, f"as the run resolved them when it was started last ({RESOLVED})")
