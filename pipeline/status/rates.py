"""How fast a run moves, from successive snapshots, by the broker's clock.

- Snapshots may come at any frequency; it keeps one per second, and the newest.
- Counts that go down (a broker that lost its newest writes, a restarted run) restart the series.
- How long a place has been empty is this process's own observation: the broker doesn't record it.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from sluice.pipeline.roles import PARTICIPANTS, RoleName
from sluice.pipeline.status.snapshot import Snapshot

COUNTS = ("enqueued", "committed", "accepted", "trained", "dead", "dropped", "tokens", "ended", "redelivered_jobs")
_POINTS = 120
_BUSY_POINTS, _LEAST_POINTS = 60, 5
_BUSY, _EQUAL = 0.5, 0.1


class Rates:
    """`per_s` and `series` take names of COUNTS. One task adds; any thread may read."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, int]]] = deque(maxlen=_POINTS + 1)  # Unix s, counts
        self._now: Snapshot | None = None
        self._idle: dict[str, tuple[float, bool]] = {}  # since (Unix s), and whether its start was seen
        self._busy: deque[dict[RoleName, float]] = deque(maxlen=_BUSY_POINTS)  # share of its processes that work

    def add(self, now: Snapshot) -> None:
        """Add the newest snapshot; one that isn't newer than the last is ignored."""
        counts = {name: int(getattr(now, name)) for name in COUNTS}
        counts["trained"] += now.stepped  # a checkpoint would let them jump
        counts["ended"] += now.stepped
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
        self._busy.append(_working(now))

    @property
    def bottleneck(self) -> list[RoleName]:
        """The role that works while the others wait, in the last minute; several if they are about equally busy.

        Empty if every role mostly waits, or too little was seen.
        """
        busy = list(self._busy)
        if len(busy) < _LEAST_POINTS:
            return []
        roles: list[RoleName] = [role for role in PARTICIPANTS if role in busy[-1]]
        shares: dict[RoleName, float] = {}
        for role in roles:
            shares[role] = sum(seen.get(role, 0.0) for seen in busy) / len(busy)
        most = max(shares.values(), default=0.0)
        return [role for role, share in shares.items() if share >= max(_BUSY, most - _EQUAL)]

    def idle(self, name: str) -> tuple[float, bool] | None:
        """For how many seconds `jobs`, `results`, `batches` or `weights` has been empty, as far as was seen.

        And whether the start was seen; if not, it has been empty for longer.
        """
        found = self._idle.get(name)
        return None if found is None or self._now is None else (self._now.at - found[0], found[1])

    def per_s(self, name: str, window_s: float = 15.0) -> float:
        """Over the snapshots of the last `window_s`; 0 before the second one."""
        seen = list(self._seen)
        if len(seen) < 2:
            return 0.0
        last_at, last = seen[-1]
        first_at, first = next((look for look in seen if last_at - look[0] <= window_s), seen[-2])
        if first_at == last_at:  # snapshots are further apart than the window
            first_at, first = seen[-2]
        return (last[name] - first[name]) / (last_at - first_at)

    @property
    def eta_s(self) -> float | None:
        """Until every sequence has ended; 0 when they have, None if unknown."""
        now = self._now
        if now is None:
            return None
        left = (now.total if now.total is not None else now.enqueued) - now.ended - now.stepped
        if now.complete or (now.total is not None and left <= 0):
            return 0.0
        rate = self.per_s("ended", 60.0)
        return left / rate if rate > 0 else None

    def series(self, name: str) -> list[float]:
        """Per second, oldest first, up to 120 points."""
        looks = list(self._seen)
        return [(b[1][name] - a[1][name]) / (b[0] - a[0]) for a, b in pairwise(looks)]


def _working(now: Snapshot) -> dict[RoleName, float]:
    found: dict[RoleName, float] = {}
    for role in PARTICIPANTS:
        rows = [row for row in now.processes if row.role == role and row.is_alive]
        if rows:
            found[role] = sum(row.wait is None for row in rows) / len(rows)
    return found


def _stored(now: Snapshot) -> dict[str, int]:
    return {
        "jobs": now.queued_jobs,
        "results": sum(lag.entries for lag in now.lag if lag.stream.startswith("results")),
        "batches": sum(lag.entries for lag in now.lag if lag.stream == "batches"),
        "weights": 0 if now.latest_version is None else 1,
    }
