"""How fast a run goes: from looks at it, one after the other, by the broker's clock.

- Looks may come as often as one likes; what is kept is one a second, and the newest.
- Counts that go down (a broker that lost its newest part, a run that began anew) begin the series anew.
- Since when nothing lies in a place is what this process saw: the broker does not keep it.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from sluice.pipeline.status.snapshot import Snapshot

COUNTS = ("enqueued", "committed", "accepted", "trained", "dead", "dropped", "tokens", "ended", "redelivered_jobs")
_POINTS = 120


class Rates:
    """`per_s` and `series` take names of COUNTS."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, int]]] = deque(maxlen=_POINTS + 1)  # Unix s, counts
        self._now: Snapshot | None = None
        self._idle: dict[str, tuple[float, bool]] = {}  # since (Unix s), and whether it was seen to begin

    def add(self, now: Snapshot) -> None:
        """The newest look; one that is not newer than the last one changes nothing."""
        counts = {name: int(getattr(now, name)) for name in COUNTS}
        if self._seen and any(counts[name] < old for name, old in self._seen[-1][1].items()):
            self._seen.clear()
        if self._seen and now.at <= self._seen[-1][0]:
            return
        if len(self._seen) > 1 and self._seen[-1][0] - self._seen[-2][0] < 1.0:
            self._seen.pop()
        self._seen.append((now.at, counts))
        idle = [name for name, count in _stored(now).items() if not count]
        self._idle = {name: self._idle.get(name, (now.at, self._now is not None)) for name in idle}
        self._now = now

    def idle(self, name: str) -> tuple[float, bool] | None:
        """For how many seconds nothing has been in `jobs`, `results`, `batches` or `weights`, as far as was seen.

        And whether that was seen to begin; else it has been so for longer.
        """
        found = self._idle.get(name)
        return None if found is None or self._now is None else (self._now.at - found[0], found[1])

    def per_s(self, name: str, window_s: float = 15.0) -> float:
        """Over the looks of the last `window_s`; 0 before the second look."""
        if len(self._seen) < 2:
            return 0.0
        last_at, last = self._seen[-1]
        first_at, first = next((look for look in self._seen if last_at - look[0] <= window_s), self._seen[-2])
        if first_at == last_at:  # the looks are further apart than the window
            first_at, first = self._seen[-2]
        return (last[name] - first[name]) / (last_at - first_at)

    @property
    def eta_s(self) -> float | None:
        """Until every sequence has ended; 0 when they have, None while nothing can be said."""
        now = self._now
        if now is None:
            return None
        left = (now.total if now.total is not None else now.enqueued) - now.ended
        if now.complete or (now.total is not None and left <= 0):
            return 0.0
        rate = self.per_s("ended", 60.0)
        return left / rate if rate > 0 else None

    def series(self, name: str) -> list[float]:
        """Per second, oldest first, up to 120 points."""
        looks = list(self._seen)
        return [(b[1][name] - a[1][name]) / (b[0] - a[0]) for a, b in pairwise(looks)]


def _stored(now: Snapshot) -> dict[str, int]:
    return {
        "jobs": now.queued_jobs,
        "results": sum(lag.entries for lag in now.lag if lag.stream.startswith("results")),
        "batches": sum(lag.entries for lag in now.lag if lag.stream == "batches"),
        "weights": 0 if now.latest_version is None else 1,
    }
