"""What happened to a job, as the queue's scripts noted it: `l` of the entry that ended it.

- One line per event: ms, a letter, attempt, worker, detail, with a tab between. Times are the broker's.
- While a job lives, `log` of its state has the attempts that came to nothing; the state itself says the rest.
- A log keeps its newest lines (log.lua says how much); what cannot be read is left out, never an error.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.wire.codec import LAST_S, integer_or

EventKind = Literal["enqueued", "claimed", "handed_back", "lost", "ended"]
_KINDS: dict[str, EventKind] = {"e": "enqueued", "c": "claimed", "h": "handed_back", "l": "lost", "x": "ended"}


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    at: float  # Unix time
    kind: EventKind
    attempt: int = 0  # 0 before the first claim
    worker: str = ""
    detail: str = ""


def parse_log(raw: bytes) -> list[JobEvent]:
    """The events, oldest first."""
    found: list[JobEvent] = []
    for line in raw.decode(errors="replace").split("\n"):
        parts = line.split("\t")
        at_ms = integer_or(parts[0], None, most=int(LAST_S * 1000))
        if len(parts) == 5 and at_ms is not None and parts[1] in _KINDS:
            at, kind, attempt = at_ms / 1000, _KINDS[parts[1]], integer_or(parts[2], 0)
            found.append(JobEvent(at=at, kind=kind, attempt=attempt, worker=parts[3], detail=parts[4]))
    return found
