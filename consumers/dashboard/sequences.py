"""The sequence browser: the list with its filter, one sequence, and its picture.

- The list is a plain form; with scripts htmx asks for the table alone while one types, and the address follows.
- All that blocks (SQLite, tokenizer, the task's steps, files) runs in threads; a task's steps have a deadline.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from consumers.dashboard.look import look_of
from consumers.dashboard.problems import checked_id, problem_page
from consumers.dashboard.render import render
from consumers.dashboard.sequence_colours import COLOURINGS, KINDS
from consumers.dashboard.sequence_desk import desk_of
from consumers.dashboard.sequence_page import MOST_TOKENS, Choice, build
from consumers.dashboard.sequence_picture import read_picture
from consumers.dashboard.sequences_filter import MOST_CURSOR, address, count_set, read_filter
from pipeline.errors import RequestError

ROWS = 50
_GONE = (
    "No finished sequence of this id is in the history. It may still be running (see the jobs), or it was pruned"
    " (history.max_sequences), or history.enabled is off."
)
router = APIRouter()


@router.get("/sequences")
async def sequences(request: Request) -> Response:
    """The list; its table alone for htmx."""
    look, asked = look_of(request), request.query_params
    wanted, problem = read_filter(asked)
    before = asked.get("before", "")[:MOST_CURSOR]
    page = await asyncio.to_thread(look.reader.sequences, wanted, ROWS, before)
    values = {
        "wanted": wanted,
        "problem": problem,
        "page": page,
        "older": address(wanted, page.next) if page.next else "",
        "newest": address(wanted) if before else "",
        "conditions": count_set(wanted),
    }
    if request.headers.get("HX-Target") == "found":
        answer = render(request, "sequences_table.html.j2", **values)
        answer.headers["HX-Push-Url"] = address(wanted, before)
    else:
        choices = await asyncio.to_thread(look.reader.choices)
        totals = await asyncio.to_thread(look.reader.totals)
        answer = render(request, "sequences.html.j2", **values, choices=choices, totals=totals)
    answer.headers["Vary"] = "HX-Target"
    return answer


@router.get("/sequences/{seq_id:path}")
async def sequence(request: Request, seq_id: str) -> Response:
    """One sequence."""
    look = look_of(request)
    detail = await asyncio.to_thread(look.reader.sequence, checked_id(seq_id))
    if detail is None:
        return problem_page(request, 404, _GONE)
    resolved = await asyncio.to_thread(look.run_config.read)
    desk = desk_of(request.app.state, resolved.config)
    page = await build(desk, look.config, detail, Choice.read(request.query_params))
    words = {"kinds": KINDS, "colourings": COLOURINGS, "most": MOST_TOKENS}
    return render(request, "sequence.html.j2", page=page, detail=detail, row=detail.row, **words)


@router.get("/pictures/{seq_id:path}")
async def picture(request: Request, seq_id: str) -> Response:
    """The picture of a finished sequence, as it lies on disk."""
    look = look_of(request)
    detail = await asyncio.to_thread(look.reader.sequence, checked_id(seq_id))
    if detail is None or detail.result is None:
        return problem_page(request, 404, _GONE)
    try:
        found = await asyncio.to_thread(read_picture, look.config, detail.result)
    except RequestError as error:
        return problem_page(request, 404, f"This sequence's picture is not shown: {error}")
    if found is None:
        return problem_page(request, 404, "This sequence has no picture.")
    return Response(found.data, media_type=found.media_type)
