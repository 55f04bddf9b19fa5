"""The stages of a run: the contents of each, its rate, and what it waits for. Pure; produces no text.

producer, gateway ─▶ queue ─▶ worker ─▶ results ─▶ consumer ─▶ batches ─▶ trainer ─▶ weights
                                                             scorer ◀──┘

How fast a run moves (`Rates`) comes from successive snapshots, by the broker's clock:

- Snapshots may come at any frequency; it keeps one per second, and the newest.
- Counts that go down (a broker that lost its newest writes, a restarted run) restart the series.
- How long a place has been empty is this process's own observation: the broker doesn't record it.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Literal, cast, get_args

import msgspec

from sluice.pipeline.roles import PARTICIPANTS, ROLES, RoleName, known
from sluice.pipeline.status.snapshot import Lag, Process, Snapshot, Stall, StallKind

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


StageName = Literal[
    "producer",
    "gateway",
    "queue",
    "worker",
    "results",
    "consumer",
    "batches",
    "trainer",
    "weights",
    "scorer",
    "evaluator",
]
StageState = Literal["working", "waiting", "stalled", "done", "off"]
# Stalls per storage stage: those of the roles that should empty it, or that hold the newest items.
_STUCK_BY: dict[StageName, tuple[StallKind, ...]] = {
    "queue": ("no_worker", "guard_refused"),
    "results": ("no_consumer", "consumer_lag"),
    "batches": ("no_trainer", "trainer_dead"),
    "weights": ("old_versions",),
}


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One box in the flow: a role's processes, or the items between two roles."""

    name: StageName
    state: StageState
    count: int | None = None  # live processes, or items in it; for weights the version
    rate: tuple[float, str] | None = None  # how fast items pass, and the unit
    stall: Stall | None = None  # for a role: what blocks it
    busy: list[Process] = []  # for a role: working processes
    waiting: list[Process] = []  # for a role: waiting processes, longest wait first
    taken: int = 0  # for a stream: read by its owner, not acked
    oldest_s: float | None = None
    idle: tuple[float, bool] | None = None  # seconds it has been empty; whether the start was seen


def stages(now: Snapshot, rates: Rates) -> list[Stage]:
    """All stages, in the order of the flow; a role that this run doesn't use is `off`."""
    found = [_stage(now, rates, name) for name in get_args(StageName)]
    if any(row.is_alive and not row.is_onlooker for row in now.processes):
        return found
    going = ("working", "waiting")  # what is left in a stream: nobody reads it, and nobody will by itself
    return [msgspec.structs.replace(one, state="off") if one.state in going else one for one in found]


def is_optional(name: StageName) -> bool:
    """Whether only some runs use it."""
    role = known(name)
    return role is not None and role.is_optional


def _stage(now: Snapshot, rates: Rates, name: StageName) -> Stage:
    if name == "queue":
        return _queue(now, rates)
    if name == "results":
        return _stream(now, rates, name, "consumer", "committed")
    if name == "batches":
        return _stream(now, rates, name, "trainer", "accepted")
    return _weights(now, rates) if name == "weights" else _role(now, rates, name)


def _role(now: Snapshot, rates: Rates, name: RoleName) -> Stage:
    rows = [row for row in now.processes if row.role == name and row.is_alive]
    busy = [row for row in rows if row.wait is None]
    waiting = sorted((row for row in rows if row.wait is not None), key=lambda row: -(row.waiting_s or 0))
    found = [stall for stall in now.stalls if stall.role == name]
    found.sort(key=lambda stall: stall.kind == "process_failed")  # a missing role tells more
    stall, rate = next(iter(found), None), ROLES[name].rate
    return Stage(
        name=cast(StageName, name),
        state=_role_state(now, name, stall, busy, waiting),
        count=len(rows),
        rate=rate and (rates.per_s(rate[0]), rate[1]),
        stall=stall,
        busy=busy,
        waiting=waiting,
    )


def _role_state(
    now: Snapshot, name: RoleName, stall: Stall | None, busy: list[Process], waiting: list[Process]
) -> StageState:
    is_played = bool(busy or waiting)
    if stall is not None and stall.blocks:
        return "stalled"
    if now.complete and (is_played or not ROLES[name].is_optional):
        return "done"
    if not is_played:
        return "done" if name == "producer" and now.exhausted else "off"
    return "working" if busy else "waiting"


def _queue(now: Snapshot, rates: Rates) -> Stage:
    """Waiting and running jobs."""
    depth, state = now.depth, cast(StageState, "working")
    if now.complete or (not now.queued_jobs and now.exhausted):
        state = "done"
    elif not now.queued_jobs:
        state = "waiting"
    elif _is_stuck(now, "queue"):
        state = "stalled"
    elif depth is not None and not depth.running:
        state = "waiting"
    return Stage(
        name="queue",
        state=state,
        count=now.queued_jobs,
        rate=(rates.per_s("committed"), "seq/s"),
        oldest_s=depth and depth.oldest_s,
        idle=rates.idle("jobs"),
    )


def _stream(now: Snapshot, rates: Rates, name: StageName, reader: RoleName, passes: str) -> Stage:
    """Items that one role has finished and the next one hasn't acked."""
    lags = [lag for lag in now.lag if lag.stream.startswith(ROLES[reader].stream)]
    entries, taken = sum(lag.entries for lag in lags), sum(lag.taken for lag in lags)
    state: StageState = "working" if taken else "waiting"
    if now.complete:
        state = "done"
    elif entries and _is_stuck(now, name):
        state = "stalled"
    return Stage(
        name=name,
        state=state,
        count=entries,
        rate=(rates.per_s(passes), "seq/s"),
        taken=taken,
        oldest_s=_oldest(lags),
        idle=rates.idle(name),
    )


def _weights(now: Snapshot, rates: Rates) -> Stage:
    """The newest version, and how far the workers are behind it."""
    state: StageState = "waiting" if now.latest_version is None else "working"
    if now.complete:
        state = "done"
    elif state == "working" and _is_stuck(now, "weights"):
        state = "stalled"
    return Stage(name="weights", state=state, count=now.latest_version, idle=rates.idle("weights"))


def _is_stuck(now: Snapshot, name: StageName) -> bool:
    return any(stall.kind in _STUCK_BY[name] and stall.blocks for stall in now.stalls)


def _oldest(lags: list[Lag]) -> float | None:
    return max((lag.oldest_s for lag in lags if lag.oldest_s is not None), default=None)
