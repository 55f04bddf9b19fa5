"""A look at the prompts before a run: how many there are, the first one that cannot be used, and whether the run was
begun on them."""

from __future__ import annotations

import time

from pipeline.config import Config
from pipeline.prompts.admission import Limits
from pipeline.run.preflight import RowsFound
from producers.place import refuse_other_source
from producers.sources import Malformed, count_rows, fingerprint, read_rows


def look_at_rows(config: Config, patience_s: float) -> RowsFound:
    """Read the rows of one epoch, for at most `patience_s`; raises DataError for a file that cannot be read."""
    until = time.monotonic() + patience_s
    total, read, malformed, first = count_rows(config.data), 0, 0, None
    for row in read_rows(config.data, Limits.of_model(config.model.path)):
        read += 1
        if isinstance(row, Malformed):
            malformed += 1
            first = first or f"{row.where}: {row.problem}"
        if time.monotonic() > until:
            break
    return RowsFound(rows=total, read=read, malformed=malformed, first_malformed=first)


def look_at_source(config: Config, held: dict[bytes, bytes]) -> str:
    """What there is to say of going on with `held`, the broker's note of the source; raises ConfigError, DataError."""
    return refuse_other_source(config, held, fingerprint(config.data)) or "begun on these data"
