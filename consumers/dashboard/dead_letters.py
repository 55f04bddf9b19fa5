"""Dead letters: by reason, a page at a time, and one with its payload; replayed and dropped if allowed.

- A page reads at most `_SCANNED` rows; if fewer match, its `next` continues from there.
- Reasons are counted over the newest `_COUNTED`, and recounted only when the stream changed.
- Rows hold payloads, so reading many is slow: a list stops after `_LIST_S`, a search for one letter after `_FIND_S`.
- Actions: only with `--allow-actions`, from a page at this very address (no other site can make a browser do it), and
  through htmx, since a plain form on another site can't send its header. Each has `_ACT_S`; anything not done by then
  stays listed, and the response says so. The response is a fragment; `letters-changed` makes the list reload.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.render import checked_id, render
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.dead_letters import DeadLetters, Done, Row, Selection, read_letter

router = APIRouter()
_SHOWN = 50
_SCANNED, _COUNTED, _AT_ONCE = 10_000, 10_000, 500
_LIST_S, _FIND_S = 2.0, 20.0
_TOO_MANY = (
    f"The dead letters could not be searched within {_FIND_S:g} s. Open this one from the list of dead letters,"
    " or use `sluice dlq show`."
)
_ENTRY = re.compile(r"\d{1,15}-\d{1,15}")
_FORM = "application/x-www-form-urlencoded"
_ACT_S = 60.0
_CHANGED = {"HX-Trigger": "letters-changed"}
_OFF = "Actions are off. Start the dashboard with --allow-actions, or use `sluice dlq`."
_ELSEWHERE = "The request did not come from a page of this dashboard, so nothing was done."


class Reasons(NamedTuple):
    """Count of each reason among the newest letters of a stream that ended at `newest` and held `entries`."""

    newest: str
    entries: int
    counts: dict[str, int]
    complete: bool


class Found(NamedTuple):
    """A page; `next` is "" at the end."""

    rows: list[Row]
    next: str


@router.get("/dead-letters")
async def dead_letters(request: Request, reason: str = "", job: str = "", before: str = "") -> Response:
    """Newest first, filtered by reason and job if given."""
    monitor = monitor_of(request)
    if before and not _ENTRY.fullmatch(before):
        raise HTTPException(400, "Invalid position in the list. Start from its first page.")
    found = await monitor.ask(_page(letters_of(monitor), reason.strip(), job.strip(), before or "+"))
    reasons = await monitor.ask(_reasons(request, monitor))
    here = str(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
    parts = {
        "here": here,
        "rows": found.rows,
        "next": found.next,
        "before": before,
        "reasons": reasons,
        "counted": sum(reasons.counts.values()),
    }
    return render(request, "dead_letters.html.j2", **parts, reason=reason.strip(), job=job.strip())


@router.get("/dead-letters/{seq_id:path}")
async def dead_letter(request: Request, seq_id: str, entry: str = "") -> Response:
    """One letter in full; no search is needed if its stream `entry` is given."""
    monitor, name = monitor_of(request), checked_id(seq_id)
    known = entry if _ENTRY.fullmatch(entry) else None
    try:
        async with asyncio.timeout(_FIND_S):
            letter = await read_letter(letters_of(monitor), name, entry_id=known)
    except TimeoutError as error:
        raise HTTPException(503, _TOO_MANY) from error
    except BrokerError:
        raise
    except SluiceError as error:
        gone = "No dead letter has this id: it was replayed or dropped, or it never died."
        raise HTTPException(404, gone) from error
    job = None if letter.job is None else msgspec.json.format(msgspec.json.encode(letter.job), indent=2).decode()
    return render(request, "dead_letter.html.j2", letter=letter, payload=job)


def letters_of(monitor: Monitor) -> DeadLetters:
    return DeadLetters(monitor.client, monitor.config)


async def _page(letters: DeadLetters, reason: str, job: str, before: str) -> Found:
    """The newest `_SHOWN` matches."""
    rows: list[Row] = []
    until = time.monotonic() + _LIST_S
    for _ in range(_SCANNED // _AT_ONCE):
        if time.monotonic() > until:
            break
        page = await letters.newest(before, _AT_ONCE)
        for row in page:
            before = row.entry_id
            if reason in ("", row.letter.reason) and job in ("", row.job_id):
                rows.append(row)
            if len(rows) == _SHOWN:
                return Found(rows, before)
        if len(page) < _AT_ONCE:
            return Found(rows, "")
    return Found(rows, before)


async def _reasons(request: Request, monitor: Monitor) -> Reasons:
    client: Any = monitor.client
    newest = await client.xrevrange(monitor.keys.dead, count=1)
    entries = int(await client.xlen(monitor.keys.dead))
    last = newest[0][0].decode() if newest else ""
    known: Reasons | None = getattr(request.app.state, "reasons", None)
    if known is None or (known.newest, known.entries) != (last, entries):
        known = request.app.state.reasons = await _count(letters_of(monitor), last, entries)
    return known


async def _count(letters: DeadLetters, newest: str, entries: int) -> Reasons:
    counts, before, seen = Counter[str](), "+", 0
    until = time.monotonic() + _LIST_S
    while seen < _COUNTED and time.monotonic() < until and (page := await letters.newest(before, _AT_ONCE)):
        counts.update(row.letter.reason for row in page)
        before, seen = page[-1].entry_id, seen + len(page)
    return Reasons(newest, entries, dict(counts.most_common()), seen >= entries)


@router.post("/dead-letters/replay")
async def replay(request: Request) -> Response:
    """Send letters back to the queue."""
    selection = await _selection(request)
    return _answer(request, "replayed", await in_time(letters_of(monitor_of(request)).replay(selection), "replayed"))


@router.post("/dead-letters/drop")
async def drop(request: Request) -> Response:
    """Delete letters."""
    selection = await _selection(request)
    return _answer(request, "dropped", await in_time(letters_of(monitor_of(request)).drop(selection), "dropped"))


async def in_time(work: Awaitable[list[Done]], word: str, deadline_s: float = _ACT_S) -> list[Done]:
    """The results; 503 if it takes longer."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError as error:
        get_logger().warning(f"not all dead letters were {word}", deadline_s=deadline_s)
        says = f"Not all were {word} within {deadline_s:g} s. The ones still listed were not; try again."
        raise HTTPException(503, says, _CHANGED) from error


def check_origin(request: Request) -> None:
    """Raises 403 unless actions are on and the request comes from a page of this dashboard."""
    if not request.app.state.allow_actions:
        raise HTTPException(403, _OFF)
    headers = request.headers
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    same_site = site in (None, "same-origin")
    same_host = origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()
    told = site is not None or origin is not None
    if not (told and same_site and same_host and headers.get("HX-Request") == "true"):
        raise HTTPException(403, _ELSEWHERE)


async def _selection(request: Request) -> Selection:
    """The form as a selection: one sequence, a reason, or all."""
    check_origin(request)
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(400, "The form cannot be read.")
    try:
        form = parse_qs((await request.body()).decode(), strict_parsing=True, errors="strict", max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error
    given = {name: values[0] for name, values in form.items() if name in ("seq_id", "reason", "everything")}
    if len(given) != 1:
        raise HTTPException(400, "Select dead letters: one sequence, one reason, or all.")
    if "seq_id" in given:
        return Selection(seq_ids=frozenset({checked_id(given["seq_id"])}))
    return Selection(reason=given.get("reason"), everything="everything" in given)


def _answer(request: Request, word: str, done: list[Done]) -> Response:
    good, bad = [each for each in done if each.problem is None], [each for each in done if each.problem]
    count = sum(len(each.sequences) for each in good)
    get_logger().info(f"dead letters {word}", sequences=count, refused=len(bad))
    answer = render(request, "acted.html.j2", word=word, count=count, good=good, bad=bad)
    answer.headers.update(_CHANGED)
    return answer
