"""What the queue and each process did over a run's life: bounded, kept in the history's directory.

    a snapshot a second ─▶ Timeline.add ─▶ bins, lives ─▶ /workers: strips and lines; /jobs: curves
                                  └─▶ timeline.json, every few seconds: a run that is over has them too

- A bin is what was seen between two times. Beyond MOST bins, two neighbours become one: the whole run stays, coarser.
- A life is a process from its start to its end; a name with several lives was restarted. Of those that ended, the
  newest `_MOST_LIVES` are kept; a name without a life leaves the bins.
- Only the dashboard writes it, from heartbeats and counts that it reads anyway: no role pays for it. It can be deleted
  at any time; what was seen before is then lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sluice.consumers.history.curves import Chart, line
from sluice.pipeline.files import write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.live_jobs import JOB_STATES
from sluice.pipeline.status.heartbeat import ALIVE_S, Heartbeat
from sluice.pipeline.status.snapshot import Process, Snapshot
from sluice.pipeline.wire.waits import WaitKind

NAME = "timeline.json"
MOST = 360  # bins
_SAVE_S = 10.0
_PAUSE_S = 900.0  # without a look: what comes after is another sitting
_MOST_LIVES = 200  # that ended, and whose row is gone
_BLIND_S = 15.0  # a longer time without a look is left white
_RATE_S = 10.0  # a rate is counted over at least that long: workers count whole sequences

Mood = Literal["working", "idle", "held", "loading", "trouble"]
MOODS: dict[Mood, str] = {
    "working": "works", "idle": "waits for work", "held": "is held back", "loading": "loads or prepares",
    "trouble": "fails or is silent",
}  # fmt: skip
_MOODS: dict[str, Mood] = {
    "working": "working", "failed": "trouble", "silent": "trouble",
    WaitKind.BROKER_MEMORY: "trouble",
    WaitKind.CREDIT: "held", WaitKind.ROLE: "held", WaitKind.PARTITION: "held", WaitKind.ISOLATION: "held",
    WaitKind.SHARE: "held",
    WaitKind.DRAIN: "held", WaitKind.PEER: "held", WaitKind.SAVING: "held", WaitKind.OTHER: "held",
    WaitKind.ENGINE: "loading", WaitKind.MODEL: "loading", WaitKind.TOKENIZER: "loading",
    WaitKind.CHECKPOINT: "loading", WaitKind.FORWARD_PROOF: "loading", WaitKind.WEIGHTS: "loading",
    WaitKind.VERSIONS: "loading", WaitKind.PROMPTS: "loading", WaitKind.IMAGES: "loading",
    WaitKind.PUBLICATION: "loading", WaitKind.SAVING: "loading",
    WaitKind.JOBS: "idle", WaitKind.RESULTS: "idle", WaitKind.BATCHES: "idle", WaitKind.SCORE_JOBS: "idle",
    WaitKind.REQUESTS: "idle", WaitKind.ROLLOUTS: "idle", WaitKind.SCORES: "idle", WaitKind.REWARDS: "idle",
    WaitKind.NEXT_VERSION: "idle", WaitKind.ANSWERS: "idle",
}  # fmt: skip
_COUNTED = {"worker": "tokens", "consumer": "handed", "trainer": "samples", "scorer": "scored"}  # facts
UNITS = {
    "producer": "seq/s", "worker": "tok/s", "consumer": "seq/s", "trainer": "seq/s", "scorer": "seq/s",
}  # fmt: skip
"""Role → the unit of its rate."""
STATES = {
    "working": "working", "credit": "waiting for credit", "jobs": "waiting for jobs", "results": "waiting for results",
    "batches": "waiting for batches", "requests": "waiting for requests", "weights": "loading weights",
    "model": "loading the model", "engine": "loading the engine", "scores": "waiting for scores",
    "rewards": "in reward functions", "prompts": "preparing prompts", "images": "waiting for images",
    "drain": "draining", "score_jobs": "waiting for score jobs", "rollouts": "waiting for rollouts",
    "broker_memory": "broker full", "forward_proof": "proving the forward pass", "isolation": "waiting to run alone",
    "tokenizer": "loading the tokenizer", "next_version": "waiting for a version", "answers": "waiting for answers",
    "saving": "waiting for the disk", "checkpoint": "loading a checkpoint",
}  # fmt: skip
"""State → a few words."""


def state_of(row: Process) -> str:
    """`working`, `failed`, `silent`, or what it waits for (a WaitKind)."""
    if row.ended_at is not None:
        return "failed"
    if not row.is_alive:
        return "silent"
    return "working" if row.wait is None else row.wait.kind.value


def mood(state: str) -> Mood:
    """Which of the few kinds a state is of."""
    return _MOODS.get(state, "held")


class Seen(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One process in one bin; the numbers are of its last look."""

    states: dict[str, int]  # state → looks
    at: float  # Unix s, of the heartbeat
    started: float  # Unix s; another one is another life
    count: int | None = None  # of what its role counts
    cpu_ms: int | None = None  # since its start
    memory: int | None = None  # bytes

    def joined(self, later: Seen) -> Seen:
        return Seen(
            states=dict(Counter(self.states) + Counter(later.states)),
            at=later.at,
            started=later.started,
            count=later.count,
            cpu_ms=later.cpu_ms,
            memory=later.memory,
        )

    @property
    def mood(self) -> Mood:
        """What it mostly did; any trouble shows."""
        found: dict[Mood, int] = {}
        for state, looks in self.states.items():
            found[mood(state)] = found.get(mood(state), 0) + looks
        if "trouble" in found:
            return "trouble"
        return max(found.items(), key=lambda one: one[1])[0] if found else "idle"


class Bin(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What was seen from `at` to `until` (Unix s); jobs are sums over looks at the queue, counts of the last look."""

    at: float
    until: float
    looks: int
    jobs: dict[str, int]  # state of a job → sum
    oldest_s: float  # the longest that the next ready job had waited
    counts: dict[str, int]  # retried jobs, dead and dropped sequences since the start of the run
    processes: dict[str, Seen]
    queue_looks: int = 0  # of the looks, those that saw the queue

    @property
    def counted(self) -> int:
        """Looks that `jobs` is a sum of; a file may be of before they were counted."""
        return self.queue_looks or (self.looks if self.jobs else 0)

    def mean(self, state: str) -> float:
        """Jobs in that state; only if some look saw the queue."""
        return self.jobs.get(state, 0) / self.counted

    def follows(self, before: Bin) -> bool:
        """Whether both are of one sitting: without a long pause, and the clock went forward."""
        return 0 <= self.at - before.until <= _PAUSE_S

    def joined(self, later: Bin) -> Bin:
        processes = dict(self.processes)
        for name, seen in later.processes.items():
            processes[name] = processes[name].joined(seen) if name in processes else seen
        return Bin(
            at=self.at,
            until=later.until,
            looks=self.looks + later.looks,
            jobs=dict(Counter(self.jobs) + Counter(later.jobs)),
            oldest_s=max(self.oldest_s, later.oldest_s),
            counts=later.counts,
            processes=processes,
            queue_looks=self.counted + later.counted,
        )


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One process from its start to its last heartbeat (Unix s)."""

    name: str
    role: str
    host: str
    pid: int
    started: float
    last: float
    ended: Literal["", "cleanly", "failed", "silent"] = ""  # "" while it lives
    error: str = ""


class _Stored(msgspec.Struct, kw_only=True):
    bins: list[Bin]
    lives: list[Life]


class Timeline:
    """One task adds; any thread may read or save: `bins` and `lives` are replaced, never changed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.bins: list[Bin] = []
        self.lives: list[Life] = []
        self._saved_at = time.monotonic()
        self._load()

    def _load(self) -> None:
        try:
            stored = msgspec.json.decode(self.path.read_bytes(), type=_Stored)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            get_logger().warning("the timeline cannot be read; it begins anew", path=str(self.path), why=str(error))
            return
        self.bins, self.lives = _named(stored.bins, stored.lives), stored.lives

    def add(self, now: Snapshot) -> None:
        """Take a snapshot; one that isn't newer than the last is ignored, unless the clock was set back."""
        if self.bins and -_BLIND_S < now.at - self.bins[-1].until <= 0:
            return
        rows = self._rows(now)
        bins, fresh = self.bins, _bin(now, rows)
        if bins and fresh.follows(bins[-1]) and now.at - bins[-1].at < self.interval_s:
            bins = [*bins[:-1], bins[-1].joined(fresh)]
        else:
            bins = [*bins, fresh]
        if len(bins) > MOST:
            bins = _halved(bins)
        lives = self._with(rows)
        ended = [life for life in lives if life.ended and (life.name, life.started) not in rows]
        if len(ended) > _MOST_LIVES:
            ended.sort(key=lambda life: life.last)
            gone = {(life.name, life.started) for life in ended[:-_MOST_LIVES]}
            lives = [life for life in lives if (life.name, life.started) not in gone]
            bins = _named(bins, lives)
        self.bins, self.lives = bins, lives

    @property
    def interval_s(self) -> float:
        """How long a bin is: a power of two, so that the sitting fits."""
        bins = self.sitting()
        lasted = bins[-1].until - bins[0].at if bins else 0.0
        return 2.0 ** max(0, math.ceil(math.log2(max(1.0, lasted / MOST))))

    def sitting(self) -> list[Bin]:
        """The bins since the dashboard last saw nothing for a quarter of an hour: a resumed run is drawn alone."""
        bins = self.bins
        for at in range(len(bins) - 1, 0, -1):
            if not bins[at].follows(bins[at - 1]):
                return bins[at:]
        return bins

    def _rows(self, now: Snapshot) -> dict[tuple[str, float], Process]:
        """The processes by name and start, without those that died before this sitting began."""
        bins = self.sitting()
        began = bins[0].at if bins and 0 <= now.at - bins[-1].until <= _PAUSE_S else now.at
        return {
            (row.name, row.started): row
            for row in now.processes
            if row.at >= began - ALIVE_S or state_of(row) not in ("silent", "failed")
        }

    def _with(self, rows: Mapping[tuple[str, float], Process]) -> list[Life]:
        """The lives, in order of their first look, as these rows tell them."""
        found = {(life.name, life.started): life for life in self.lives}
        names = {name for name, _ in rows}
        for key, life in found.items():
            if key not in rows and not life.ended:  # a clean end removes its row; a new life replaces it
                found[key] = msgspec.structs.replace(life, ended="silent" if life.name in names else "cleanly")
        for key, row in rows.items():
            found[key] = _life(row, found.get(key))
        return list(found.values())

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved_at >= _SAVE_S

    def save(self) -> None:
        """Blocking; a directory that isn't there, or can't be written, is left alone."""
        self._saved_at = time.monotonic()
        if not self.path.parent.is_dir():
            return
        try:
            write_atomic(self.path, msgspec.json.encode(_Stored(bins=self.bins, lives=self.lives)))
        except OSError as error:
            get_logger().debug("the timeline is not saved", path=str(self.path), why=str(error))

    def charts(self) -> list[Chart]:
        """Curves of the jobs, by time; empty with fewer than two bins."""
        bins = self.sitting()
        if len(bins) < 2:
            return []
        first = bins[0].at
        queue = [one for one in bins if one.counted]
        found: list[Chart] = []

        def chart(
            key: str, title: str, unit: str, about: str, seen: Sequence[Bin], lines: Mapping[str, Sequence[float]]
        ) -> None:
            if not seen:
                return
            times = [((one.until - first) / 60, one.until) for one in seen]
            drawn = [
                line(name, [(minute, at, value) for (minute, at), value in zip(times, values, strict=True)])
                for name, values in lines.items()
            ]
            coloured = [msgspec.structs.replace(one, colour=number) for number, one in enumerate(drawn)]
            found.append(Chart(key=key, title=title, unit=unit, about=about, lines=coloured, x="minute"))

        states = {"ready": "waiting", "running": "held by a worker", "deferred": "deferred", "alone": "to run alone"}
        jobs = {name: [one.mean(state) for one in queue] for state, name in states.items()}
        shown = {
            name: values for name, values in jobs.items() if any(values) or name in ("waiting", "held by a worker")
        }
        chart("queue", "Jobs", "jobs", "in the queue, and held by workers", queue, shown)
        oldest = {"oldest": [one.oldest_s for one in queue]}
        chart("oldest", "Longest wait", "s", "of the job that is next, since it was enqueued", queue, oldest)
        counts = {"retried": "retried jobs", "dead": "dead sequences", "dropped": "dropped sequences"}
        ended = {name: [float(one.counts.get(key, 0)) for one in bins] for key, name in counts.items()}
        chart("ended", "Retried, dead, dropped", "in all", "since the run began", bins, ended)
        return found

    def tracks(self) -> dict[str, Track]:
        """What each process of the sitting did, by name."""
        bins = self.sitting()
        if not bins:
            return {}
        first, last = bins[0].at, max(bins[-1].until, bins[0].at + 1.0)
        looks: dict[str, list[tuple[int, Seen]]] = defaultdict(list)  # name → with the number of the bin
        for at, one in enumerate(bins):
            for name, seen in one.processes.items():
                looks[name].append((at, seen))
        lives: dict[str, list[Life]] = defaultdict(list)
        for life in self.lives:
            if life.last >= first:
                lives[life.name].append(life)
        return {name: _track(name, bins, some, lives[name], first, last) for name, some in looks.items()}


class Track(msgspec.Struct, kw_only=True):
    """One name on the time axis from 0 to WIDTH; `paths` and `lines` are SVG, heights 0 to 1 and HEIGHT."""

    name: str
    paths: dict[Mood, str]
    starts: list[float]  # of each life but the first
    shares: list[tuple[str, float]]  # state → share of its looks, the longest first
    rate: Spark | None
    cpu: Spark | None
    memory: Spark | None
    lives: list[Life]


class Spark(msgspec.Struct, kw_only=True):
    """A small line: SVG points; the newest value, and the highest, which is the top of the drawing."""

    points: str
    last: float | None
    most: float


WIDTH, HEIGHT = 1000, 30


def _track(
    name: str, bins: Sequence[Bin], some: Sequence[tuple[int, Seen]], lives: list[Life], first: float, last: float
) -> Track:
    """`some`: what was seen of it, with the number of the bin."""
    scale = WIDTH / (last - first)
    paths: dict[Mood, list[list[float]]] = {}
    looks: dict[str, int] = {}
    for at, seen in some:
        one = bins[at]
        for state, count in seen.states.items():
            looks[state] = looks.get(state, 0) + count
        start = (one.at - first) * scale
        end = (min(bins[at + 1].at, one.until + _BLIND_S) - first) * scale if at + 1 < len(bins) else float(WIDTH)
        runs = paths.setdefault(seen.mood, [])
        if runs and abs(runs[-1][1] - start) < 1e-6:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    total = sum(looks.values())
    counts = [(seen.at, seen.started, seen.count) for _, seen in some]
    busy = [(seen.at, seen.started, seen.cpu_ms) for _, seen in some]
    memory = [(bins[at].until, float(seen.memory)) for at, seen in some if seen.memory is not None]
    return Track(
        name=name,
        paths={each: "".join(f"M{a:.0f} 0h{max(b - a, 2):.0f}" for a, b in runs) for each, runs in paths.items()},
        starts=[round(max(0.0, (life.started - first) * scale), 1) for life in lives[1:]],
        shares=[(state, count / total) for state, count in Counter(looks).most_common()],
        rate=_spark(rates(counts), first, scale),
        cpu=_spark([(at, value / 10) for at, value in rates(busy)], first, scale),  # ms per s → per cent
        memory=_spark(memory, first, scale),
        lives=lives,
    )


def rates(counted: Iterable[tuple[float, float, int | None]]) -> list[tuple[float, float]]:
    """(time, life, count) → (time, per second), over at least `_RATE_S`; another life starts over."""
    found: list[tuple[float, float]] = []
    before: list[tuple[float, float, int]] = []
    for at, life, count in counted:
        if count is None or (before and at <= before[-1][0] and life == before[-1][1]):
            continue
        if before and (before[-1][1] != life or count < before[-1][2]):
            before = []
        while len(before) > 1 and at - before[1][0] >= _RATE_S:
            before.pop(0)
        if before and at > before[0][0]:
            found.append((at, (count - before[0][2]) / (at - before[0][0])))
        before.append((at, life, count))
    return found


def _spark(points: Sequence[tuple[float, float]], first: float, scale: float) -> Spark | None:
    if not points:
        return None
    most = max(value for _, value in points)
    top = most or 1.0
    size = max(1, len(points) // 90)
    some = [points[at : at + size] for at in range(0, len(points), size)]
    means = [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in some]
    drawn = " ".join(f"{(at - first) * scale:.0f},{HEIGHT - 1 - value / top * (HEIGHT - 3):.1f}" for at, value in means)
    return Spark(points=drawn, last=points[-1][1], most=most)


def _bin(now: Snapshot, rows: Mapping[tuple[str, float], Process]) -> Bin:
    depth = now.depth
    jobs = {name: int(getattr(depth, name)) for name in JOB_STATES} if depth else {}
    return Bin(
        at=now.at,
        until=now.at,
        looks=1,
        jobs=jobs,
        oldest_s=(depth.oldest_s or 0.0) if depth else 0.0,
        counts={"retried": now.redelivered_jobs, "dead": now.dead, "dropped": now.dropped},
        processes={name: _seen(row, now) for (name, _), row in rows.items()},
        queue_looks=int(depth is not None),
    )


def _named(bins: Sequence[Bin], lives: Iterable[Life]) -> list[Bin]:
    """The bins with the processes that have a life."""
    known = {life.name for life in lives}
    return [
        one
        if one.processes.keys() <= known
        else msgspec.structs.replace(
            one, processes={name: seen for name, seen in one.processes.items() if name in known}
        )
        for one in bins
    ]


def _life(row: Process, before: Life | None) -> Life:
    state = state_of(row)
    return Life(
        name=row.name,
        role=row.role,
        host=row.host,
        pid=row.pid,
        started=row.started,
        last=max(before.last, row.at) if before else row.at,
        ended="failed" if state == "failed" else "silent" if state == "silent" else "",
        error=f"{row.error_kind}: {row.error}" if row.error else "",
    )


def _seen(row: Process, now: Snapshot) -> Seen:
    counted = now.enqueued if row.role == "producer" else _whole(row, _COUNTED.get(row.role, ""))
    return Seen(
        states={state_of(row): 1},
        at=now.at if row.role == "producer" else row.at,
        started=row.started,
        count=counted,
        cpu_ms=_whole(row, "cpu_ms"),
        memory=_whole(row, "memory_bytes"),
    )


def _whole(row: Heartbeat, name: str) -> int | None:
    value = row.facts.get(name)
    return value if isinstance(value, int) else None


def _halved(bins: Sequence[Bin]) -> list[Bin]:
    """Pairs of neighbours as one, but not over a pause; the oldest go if there are too many pauses for that."""
    found: list[Bin] = []
    at = 0
    while at < len(bins):
        pair = bins[at : at + 2]
        if len(pair) == 2 and pair[1].follows(pair[0]):
            found.append(pair[0].joined(pair[1]))
            at += 2
        else:
            found.append(pair[0])
            at += 1
    return found[-MOST:]
