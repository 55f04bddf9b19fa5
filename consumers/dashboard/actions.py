"""What a browser may do: replay and drop dead letters.

- Only with `--allow-actions`, from a page of this very address (no other site can make a browser do it), and by htmx,
  whose header no plain form of another site can send.
- An action has `_ACT_S`; what was not done by then stays listed, and the answer says so.
- The answer is a fragment for the page's live region; `letters-changed` makes the list load again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, HTTPException, Request, Response

from consumers.dashboard.letters import letters_of
from consumers.dashboard.look import look_of
from consumers.dashboard.problems import checked_id
from consumers.dashboard.render import render
from pipeline.logs import get_logger
from pipeline.queue.dead_letters import Done, Selection

router = APIRouter()
_FORM = "application/x-www-form-urlencoded"
_ACT_S = 60.0
_CHANGED = {"HX-Trigger": "letters-changed"}
_OFF = "Actions are off. Start the dashboard with --allow-actions, or use `sluice dlq`."
_ELSEWHERE = "This did not come from a page of this dashboard, so nothing was done."


@router.post("/dead-letters/replay")
async def replay(request: Request) -> Response:
    """Send letters back to the queue."""
    selection = await _selection(request)
    return _answer(request, "replayed", await in_time(letters_of(look_of(request)).replay(selection), "replayed"))


@router.post("/dead-letters/drop")
async def drop(request: Request) -> Response:
    """Throw letters away."""
    selection = await _selection(request)
    return _answer(request, "dropped", await in_time(letters_of(look_of(request)).drop(selection), "dropped"))


async def in_time(work: Awaitable[list[Done]], word: str, deadline_s: float = _ACT_S) -> list[Done]:
    """What was done; 503 when it takes longer."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError as error:
        get_logger().warning(f"not all dead letters were {word}", deadline_s=deadline_s)
        says = f"Not all were {word} within {deadline_s:g} s. Those that are still listed were not; try it again."
        raise HTTPException(503, says, _CHANGED) from error


def check_origin(request: Request) -> None:
    """Raises 403 unless actions are on and a page of this dashboard asks."""
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
    """What the form means: one sequence, a reason, or all."""
    check_origin(request)
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(400, "The form cannot be read.")
    try:
        form = parse_qs((await request.body()).decode(), strict_parsing=True, errors="strict", max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error
    given = {name: values[0] for name, values in form.items() if name in ("seq_id", "reason", "everything")}
    if len(given) != 1:
        raise HTTPException(400, "Say which letters: one sequence, one reason, or everything.")
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
