"""A job's events as spans of time: waiting in the queue, and each attempt. Pure.

- Spans follow one another; the last one of a job that is not over is open and ends now.
- An attempt ends by the event that says so; where the log has lost it, by the next event, and its end says that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.queue.live_jobs import JobEvent

WIDTH = 1000.0  # of the drawing
_MIN_WIDTH = 2.0  # a bar that can still be seen
_ENDINGS = {"handed_back": "handed back", "lost": "lost", "ended": "ended"}


@dataclass(frozen=True)
class Span:
    """`start` and `end` are Unix times; `ending` is "" while it goes on."""

    kind: Literal["waiting", "attempt"]
    start: float
    end: float
    attempt: int = 0
    worker: str = ""
    ending: str = ""
    detail: str = ""

    @property
    def took_s(self) -> float:
        """Seconds."""
        return max(0.0, self.end - self.start)

    @property
    def css(self) -> str:
        """Its class in the drawing."""
        return "waiting" if self.kind == "waiting" else (self.ending or "running").replace(" ", "-")


@dataclass(frozen=True)
class Bar:
    """One row of the drawing."""

    span: Span
    x: float
    width: float


def spans(events: Sequence[JobEvent], now: float | None) -> list[Span]:
    """`now`: for a job that is not over; None: its last span ends with its last event."""
    found: list[Span] = []
    kind: Literal["waiting", "attempt"] | None = None
    start, held = 0.0, JobEvent(at=0.0, kind="enqueued")

    def close(at: float, ending: str, detail: str = "") -> None:
        if kind == "waiting" and at > start:
            found.append(Span("waiting", start, at, ending=ending))
        elif kind == "attempt":
            found.append(Span("attempt", start, at, held.attempt, held.worker, ending, detail))

    for event in events:
        if event.kind == "claimed":
            close(event.at, "claimed" if kind == "waiting" else "not logged")
            kind, start, held = "attempt", event.at, event
        elif event.kind == "enqueued":
            close(event.at, "enqueued again")
            kind, start = "waiting", event.at
        else:
            close(event.at, _ENDINGS[event.kind], event.detail)
            kind, start = (None if event.kind == "ended" else "waiting"), event.at
    if now is not None:
        close(max(now, start), "")
    elif kind == "attempt":
        close(start, "not logged")
    return found


def bars(found: Sequence[Span]) -> list[Bar]:
    """The spans side by side on one axis of WIDTH units."""
    if not found:
        return []
    first = min(span.start for span in found)
    total = max(max(span.end for span in found) - first, 1e-3)
    drawn: list[Bar] = []
    for span in found:
        width = max(_MIN_WIDTH, span.took_s / total * WIDTH)
        x = min((span.start - first) / total * WIDTH, WIDTH - width)
        drawn.append(Bar(span, round(x, 1), round(width, 1)))
    return drawn
