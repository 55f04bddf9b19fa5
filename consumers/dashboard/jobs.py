"""Jobs: those in the queue, from the broker, above those that are over, from the history; and one of them.

- The live table is bounded and asked anew while the page is open; the finished ones are paged by a cursor.
- The broker being away takes the live half only.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError

from consumers.dashboard.jobs_timeline import WIDTH, bars, spans
from consumers.dashboard.look import Look, look_of
from consumers.dashboard.problems import checked_id, problem_page
from consumers.dashboard.render import render
from consumers.dashboard.sequences_filter import MOST_CURSOR, clean
from consumers.history.records import JobRow, Page, SequenceFilter
from pipeline.errors import BrokerError
from pipeline.queue.live_jobs import JOB_STATES, LiveJob, LiveJobs, live_job, live_jobs

FINISHED = "finished"
ROWS = 50
_LIVE_ROWS = 100
_GLANCE = 20  # of them where nothing is asked for
_SPANS = 60  # shown of one job
_MEMBERS = 200  # sequences listed of one job
_GONE = (
    "No such job is in the queue or in the history. It may have been pruned (history.max_sequences), or"
    " history.enabled is off."
)
_AWAY = "The broker does not answer, so what is in the queue is not shown."
router = APIRouter()


@router.get("/jobs")
async def jobs(request: Request) -> Response:
    """The lists; those in the queue alone for htmx."""
    look, asked = look_of(request), request.query_params
    wanted = {name: clean(asked.get(name, "")) for name in ("search", "state", "worker")}
    live, problem = await _live(look, wanted)
    values = {"wanted": wanted, "live": live, "problem": problem, "address": "/jobs?" + _query(wanted)}
    if request.headers.get("HX-Target") == "live":
        return render(request, "jobs_live.html.j2", **values)
    before, finished = asked.get("before", "")[:MOST_CURSOR], Page[JobRow]([])
    if not wanted["worker"] and wanted["state"] in ("", FINISHED):
        finished = await asyncio.to_thread(look.reader.jobs, wanted["search"], ROWS, before)
    values |= {
        "states": (*JOB_STATES, FINISHED),
        "finished": finished,
        "older": f"/jobs?{_query({**wanted, 'before': finished.next})}" if finished.next else "",
        "newest": f"/jobs?{_query(wanted)}" if before else "",
    }
    if request.headers.get("HX-Target") == "found":
        answer = render(request, "jobs_found.html.j2", **values)
        answer.headers["HX-Push-Url"] = f"/jobs?{_query({**wanted, 'before': before})}".rstrip("?")
    else:
        workers = sorted({row.worker for row in live.rows if row.worker} if live else ())
        answer = render(request, "jobs.html.j2", **values, workers=workers)
    answer.headers["Vary"] = "HX-Target"
    return answer


@router.get("/jobs/{job_id:path}")
async def job(request: Request, job_id: str) -> Response:
    """One job, whether it runs, is over, or both (when it was replayed)."""
    look, job_id = look_of(request), checked_id(job_id)
    live, problem = await _live_job(look, job_id)
    past = await asyncio.to_thread(look.reader.job, job_id)
    if live is None and past is None:
        return problem_page(request, 404, f"{problem} {_GONE}".strip())
    members = await asyncio.to_thread(look.reader.sequences, SequenceFilter(job_id=job_id), _MEMBERS)
    events = live.events if live else past.events if past else []
    found = spans(events, time.time() if live else None)
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
        members=sorted(members.rows, key=lambda row: (row.index, row.seq_id)),
        more=bool(members.next),
    )


async def _live(look: Look, wanted: dict[str, str]) -> tuple[LiveJobs | None, str]:
    """The jobs in the queue that fit; None where they are not asked for or the broker is away."""
    search, state, worker = wanted["search"], wanted["state"], wanted["worker"]
    if state and state not in JOB_STATES:
        return None, ""
    most = _LIVE_ROWS if any(wanted.values()) else _GLANCE
    try:
        asked = live_jobs(look.client, look.keys, search=search, state=state, limit=most * (5 if worker else 1))
        found = await look.ask(asked)
    except (RedisError, OSError, BrokerError):
        return None, _AWAY
    rows = [row for row in found.rows if worker in ("", row.worker)]
    return LiveJobs(rows=rows[:most], total=found.total, seen_all=found.seen_all), ""


async def _live_job(look: Look, job_id: str) -> tuple[LiveJob | None, str]:
    try:
        return await look.ask(live_job(look.client, look.keys, job_id)), ""
    except (RedisError, OSError, BrokerError):
        return None, _AWAY


def _query(fields: dict[str, str]) -> str:
    return urlencode({name: value for name, value in fields.items() if value}, errors="replace")
