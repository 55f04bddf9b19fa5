"""Jobs: over time, by worker and by duration; queued ones above finished ones; and the page of one job.

    timeline ─▶ curves      snapshot ─▶ what each worker holds      index ─▶ how long they waited and took
- The live table is bounded and refreshed while the page is open; finished jobs are paged by a cursor.
- When the broker is away, only the live half is missing.
- A job's page shows the answers of its group side by side, and the same prompt over versions.
- It draws its events as time spans: waiting in the queue, and each attempt. Spans are consecutive; if the job isn't
  over, the last one is open and ends now. An attempt ends with the event that ends it; if the log has lost that event,
  it ends with the next one, and its ending says so.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.overview import Keeper, charts_json, points
from sluice.consumers.dashboard.render import MOST_CURSOR, checked_id, clean, problem_page, query, render
from sluice.consumers.dashboard.sequences import truth_text
from sluice.consumers.history.curves import Chart, line
from sluice.consumers.history.index import Context, HistoryIndex
from sluice.consumers.history.indexing import LEAST_S
from sluice.consumers.history.records import JobRow, Page, SequenceFilter, SequenceRow
from sluice.pipeline.errors import BrokerError, DataError
from sluice.pipeline.queue.live_jobs import JOB_STATES, JobEvent, LiveJob, LiveJobs, live_job, live_jobs
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.status.snapshot import Holder, Snapshot
from sluice.pipeline.status.text import length

FINISHED = "finished"
ROWS = 50
_LIVE_ROWS = 100
_GLANCE = 20  # jobs shown without a filter
_SPANS = 60  # shown per job
_MEMBERS = 200  # sequences listed per job
_BESIDE = 16  # answers shown side by side
_ROUGH_S = 120.0  # from here on, durations are told in minutes
_INDEX_S = 0.1  # of one request, if the index is behind
_GONE = (
    "No such job is in the queue or in the history. It may have been pruned (history.max_sequences), or"
    " history.enabled is off."
)
_AWAY = "The broker does not answer, so jobs in the queue are not shown."
router = APIRouter()
WIDTH = 1000.0  # width of the drawing
_MIN_WIDTH = 2.0  # narrowest visible bar
_ENDINGS = {"handed_back": "handed back", "lost": "lost", "ended": "ended"}


@router.get("/jobs")
async def jobs(request: Request) -> Response:
    """The lists; only the queued jobs for htmx."""
    monitor, asked = monitor_of(request), request.query_params
    wanted = {name: clean(asked.get(name, "")) for name in ("search", "state", "worker")}
    held = {"bars": held_bars(monitor.newest), "axis": WIDTH}
    if request.headers.get("HX-Target") == "held":
        return render(request, "jobs_held.html.j2", **held)
    live, problem = await _live(monitor, wanted)
    values = {"wanted": wanted, "live": live, "problem": problem, "address": "/jobs?" + query(wanted)}
    if request.headers.get("HX-Target") == "live":
        return render(request, "jobs_live.html.j2", **values)
    before, finished = asked.get("before", "")[:MOST_CURSOR], Page[JobRow]([])
    if not wanted["worker"] and wanted["state"] in ("", FINISHED):
        finished = await asyncio.to_thread(monitor.reader.jobs, wanted["search"], ROWS, before)
    values |= {
        "states": (*JOB_STATES, FINISHED),
        "finished": finished,
        "older": f"/jobs?{query({**wanted, 'before': finished.next})}" if finished.next else "",
        "newest": f"/jobs?{query(wanted)}" if before else "",
    }
    if request.headers.get("HX-Target") == "found":
        answer = render(request, "jobs_found.html.j2", **values)
        answer.headers["HX-Push-Url"] = f"/jobs?{query({**wanted, 'before': before})}".rstrip("?")
    else:
        workers = sorted({row.worker for row in live.rows if row.worker} if live else ())
        charts = await asyncio.to_thread(_drawn, monitor)
        lasted = await asyncio.to_thread(_lasted, monitor)
        now = monitor.newest
        blocked = [Keeper(stall, stall_text(now, stall)) for stall in now.stalls if stall.blocks]
        parts = {"workers": workers, "charts": charts, "lasted": lasted, "blocked": blocked}
        answer = render(request, "jobs.html.j2", **values, **parts, **held)
    answer.headers["Vary"] = "HX-Target"
    return answer


@router.get("/jobs-curves")
async def jobs_curves(request: Request) -> Response:
    """Jobs over time, as JSON; not below /jobs/, where any name may be a job's."""
    return charts_json(await asyncio.to_thread(monitor_of(request).timeline.charts))


def _drawn(monitor: Monitor) -> list[tuple[Chart, str]]:
    return [(chart, points(chart.lines[0].values)) for chart in monitor.timeline.charts()]


class HeldBar(NamedTuple):
    """What one worker holds; widths are of WIDTH, the one that holds most has all of it."""

    holder: Holder
    first: float  # width of its first attempts
    retried: float  # width of the others


def held_bars(now: Snapshot) -> list[HeldBar]:
    """One per worker that is alive or holds jobs, by name."""
    held = {one.worker: one for one in now.holders}
    held |= {row.name: Holder(worker=row.name) for row in now.alive("worker") if row.name not in held}
    most = max((one.jobs for one in held.values()), default=0) or 1
    return [
        HeldBar(one, round((one.jobs - one.retried) / most * WIDTH, 1), round(one.retried / most * WIDTH, 1))
        for _, one in sorted(held.items())
    ]


class Lasted(NamedTuple):
    """One row of the distribution: sequences that waited and took so long; widths are of WIDTH."""

    says: str
    counts: tuple[int, int]
    widths: tuple[float, float]


class Distribution(NamedTuple):
    """How long finished sequences waited in the queue, and took on a worker."""

    rows: list[Lasted]
    summary: str


def _lasted(monitor: Monitor) -> Distribution | None:
    try:
        return distribution(monitor.index.durations())
    except DataError:  # the page says elsewhere that the history can't be read
        return None


def distribution(found: Mapping[str, Mapping[int, int]]) -> Distribution | None:
    """`found` as of HistoryIndex.durations; None if nothing has finished."""
    waited, took = found.get("waited", {}), found.get("took", {})
    numbers = [*waited, *took]
    if not numbers:
        return None
    most = max([*waited.values(), *took.values()])
    rows = [
        Lasted(_between(number), (a, b), (round(a / most * WIDTH, 1), round(b / most * WIDTH, 1)))
        for number in range(min(numbers), max(numbers) + 1)
        for a, b in [(waited.get(number, 0), took.get(number, 0))]
    ]
    known = {name: counts for name, counts in (("waited", waited), ("took", took)) if counts}
    half = " and ".join(f"{name} less than {_most_of(counts, 0.5)}" for name, counts in known.items())
    tail = " and ".join(_most_of(counts, 0.95) for counts in known.values())
    return Distribution(rows, f"Half of them {half}; 19 of 20 less than {tail}.")


def _between(number: int) -> str:
    most = LEAST_S * 2**number
    if number == 0:
        return f"under {_short(most)}"
    return f"{most / 2:g} – {_short(most)}" if most < _ROUGH_S else f"{_short(most / 2)} – {_short(most)}"


def _most_of(counts: Mapping[int, int], share: float) -> str:
    """The time below which this share of them is, rounded up to the end of a row."""
    numbers, least = sorted(counts), share * sum(counts.values())
    below = accumulate(counts[number] for number in numbers)
    return _short(LEAST_S * 2 ** next(number for number, seen in zip(numbers, below, strict=True) if seen >= least))


def _short(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < _ROUGH_S else length(seconds)


@router.get("/jobs/{job_id:path}")
async def job(request: Request, job_id: str) -> Response:
    """One job: running, over, or both (if it was replayed)."""
    monitor, job_id = monitor_of(request), checked_id(job_id)
    live, problem = await _live_job(monitor, job_id)
    past = await asyncio.to_thread(monitor.reader.job, job_id)
    if live is None and past is None:
        return problem_page(request, 404, f"{problem} {_GONE}".strip())
    members = await asyncio.to_thread(monitor.reader.sequences, SequenceFilter(job_id=job_id), _MEMBERS)
    events = live.events if live else past.events if past else []
    found = spans(events, time.time() if live else None)
    rows = sorted(members.rows, key=lambda row: (row.index, row.seq_id))
    beside = await asyncio.to_thread(_beside, monitor, rows)
    return render(
        request,
        "job.html.j2",
        job_id=job_id,
        live=live,
        past=past,
        problem=problem,
        bars=bars(found),
        axis=WIDTH,
        most=_SPANS,
        events=events,
        members=rows,
        more=bool(members.next),
        **beside,
    )


class Versions(NamedTuple):
    """Answers to the same prompt, oldest version first; `total` of them are indexed."""

    prompt: int
    rows: list[SequenceRow]
    total: int
    charts: list[tuple[Chart, str]]


@router.get("/prompts/{number}/curves")
async def prompt_curves(request: Request, number: int) -> Response:
    """The reward of a prompt's answers by version, as JSON."""
    return charts_json(await asyncio.to_thread(_rewards, monitor_of(request).index, number % (1 << 62)))


def _beside(monitor: Monitor, rows: Sequence[SequenceRow]) -> dict[str, Any]:
    """The answers of a group side by side, what they answer, and the same prompt over versions."""
    index, decoded = monitor.index, [row for row in rows if row.state != "dead"][:_BESIDE]
    if not decoded:
        return {"answers": [], "context": Context(""), "truth": "", "best": None, "versions": None}
    context = index.contexts([decoded[0].seq_id]).get(decoded[0].seq_id, Context(""))
    details = [monitor.reader.sequence(row.seq_id) for row in decoded]
    texts = [(one.result.text or one.result.raw_text) if one and one.result else "" for one in details]
    index.catch_up(_INDEX_S)
    entry, versions = index.entry(decoded[0].seq_id), None
    if entry is not None and entry.prompt:
        found, total = index.same_prompt(entry.prompt)
        charts = [(chart, "") for chart in _rewards(index, entry.prompt)]
        versions = Versions(entry.prompt, [row for _, row in index.rows(found)], total, charts)
    return {
        "answers": list(zip(decoded, texts, strict=True)),
        "context": context,
        "truth": truth_text(context.truth),
        "best": max((row.reward for row in decoded if row.reward is not None), default=None),
        "versions": versions,
    }


def _rewards(index: HistoryIndex, prompt: int) -> list[Chart]:
    found = index.rewards(prompt)
    if len({version for version, _, _ in found}) < 2:
        return []
    points: list[tuple[float, float, float]] = []
    for version, members in groupby(found, lambda one: one[0]):
        _, times, rewards = zip(*members, strict=True)
        points.append((version, math.fsum(times) / len(times), math.fsum(rewards) / len(rewards)))
    about = "mean of this prompt's answers"
    return [Chart(key="reward", title="Reward", unit="mean", about=about, lines=[line("reward", points)], x="version")]


async def _live(monitor: Monitor, wanted: dict[str, str]) -> tuple[LiveJobs | None, str]:
    """The matching jobs in the queue; None if they weren't requested or the broker is away."""
    search, state, worker = wanted["search"], wanted["state"], wanted["worker"]
    if state and state not in JOB_STATES:
        return None, ""
    most = _LIVE_ROWS if any(wanted.values()) else _GLANCE
    try:
        asked = live_jobs(monitor.client, monitor.keys, search=search, state=state, limit=most * (5 if worker else 1))
        found = await monitor.ask(asked)
    except (RedisError, OSError, BrokerError):
        return None, _AWAY
    rows = [row for row in found.rows if worker in ("", row.worker)]
    return LiveJobs(rows=rows[:most], total=found.total, seen_all=found.seen_all), ""


async def _live_job(monitor: Monitor, job_id: str) -> tuple[LiveJob | None, str]:
    try:
        return await monitor.ask(live_job(monitor.client, monitor.keys, job_id)), ""
    except (RedisError, OSError, BrokerError):
        return None, _AWAY


@dataclass(frozen=True)
class Span:
    """`start` and `end` are Unix times; `ending` is "" while it is open."""

    kind: Literal["waiting", "attempt"]
    start: float
    end: float
    attempt: int = 0
    worker: str = ""
    ending: str = ""
    detail: str = ""

    @property
    def took_s(self) -> float:
        return max(0.0, self.end - self.start)

    @property
    def css(self) -> str:
        """Its CSS class."""
        return "waiting" if self.kind == "waiting" else (self.ending or "running").replace(" ", "-")


@dataclass(frozen=True)
class Bar:
    """One row of the drawing."""

    span: Span
    x: float
    width: float


def spans(events: Sequence[JobEvent], now: float | None) -> list[Span]:
    """`now`: for a job that isn't over; None: its last span ends with its last event."""
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
    """The spans, one after the other on an axis of WIDTH units."""
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
