"""The sequence browser: the filtered list, one sequence, and its picture.

- The list is a plain form; with scripts, htmx fetches just the table while you type, and updates the address. Values
  in an address are truncated, never trusted; unreadable ones are ignored, and the page says so.
- Everything that blocks (SQLite, tokenizer, the task's steps, files) runs in threads; a task's steps have a deadline.
- Anything that fails (no tokenizer, a task that fails or takes too long, a missing picture) is replaced by a message;
  the rest of the page is unaffected.
- At most MOST_TOKENS tokens are drawn at once, whatever the address requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.formats import query, url
from sluice.consumers.dashboard.monitor import monitor_of
from sluice.consumers.dashboard.outcome import BusyError, Detection, Failed, Outcome, TaskRunner, outcome, runner_of
from sluice.consumers.dashboard.picture import Drawing, drawing, read_picture, sources_of
from sluice.consumers.dashboard.render import MOST_CURSOR, checked_id, clean, problem_page, render
from sluice.consumers.dashboard.settings import run_config_of
from sluice.consumers.dashboard.tokens import (
    COLOURINGS,
    KINDS,
    Entry,
    Painted,
    Scores,
    Sheet,
    legends,
    paint,
    sampled_sheet,
    trained_sheet,
)
from sluice.consumers.history.records import SequenceDetail, SequenceFilter
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import RequestError, SluiceError
from sluice.pipeline.wire.messages import SequenceResult

ROWS = 50
_GONE = (
    "No finished sequence has this id in the history. It may still be running (see the jobs), or it was pruned"
    " (history.max_sequences), or history.enabled is off."
)
router = APIRouter()
MOST_TOKENS = 500
_LEAD = 40  # prompt tokens shown before the first sampled one, by default
SHEETS = {"sampled": "What was sampled", "trained": "What is trained on"}
_TEXTS = ("search", "state", "finish_reason", "worker", "task", "job_id")
_VERSION_DIGITS = 12


@router.get("/sequences")
async def sequences(request: Request) -> Response:
    """The list; only its table for htmx."""
    monitor, asked = monitor_of(request), request.query_params
    wanted, problem = read_filter(asked)
    before = asked.get("before", "")[:MOST_CURSOR]
    page = await asyncio.to_thread(monitor.reader.sequences, wanted, ROWS, before)
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
        choices = await asyncio.to_thread(monitor.reader.choices)
        totals = await asyncio.to_thread(monitor.reader.totals)
        answer = render(request, "sequences.html.j2", **values, choices=choices, totals=totals)
    answer.headers["Vary"] = "HX-Target"
    return answer


@router.get("/sequences/{seq_id:path}")
async def sequence(request: Request, seq_id: str) -> Response:
    monitor = monitor_of(request)
    detail = await asyncio.to_thread(monitor.reader.sequence, checked_id(seq_id))
    if detail is None:
        return problem_page(request, 404, _GONE)
    resolved = await asyncio.to_thread(run_config_of(request).read)
    runner = runner_of(request.app.state, resolved.config)
    page = await build(runner, monitor.config, detail, Choice.read(request.query_params))
    words = {"kinds": KINDS, "colourings": COLOURINGS, "most": MOST_TOKENS}
    return render(request, "sequence.html.j2", page=page, detail=detail, row=detail.row, **words)


@router.get("/pictures/{seq_id:path}")
async def picture(request: Request, seq_id: str) -> Response:
    """A picture of a finished sequence, as stored on disk; `?number=1` is its second."""
    monitor = monitor_of(request)
    detail = await asyncio.to_thread(monitor.reader.sequence, checked_id(seq_id))
    if detail is None or detail.result is None:
        return problem_page(request, 404, _GONE)
    try:
        number = _whole(request.query_params.get("number", "")) or 0
        found = await asyncio.to_thread(read_picture, monitor.config, detail.result, number)
    except RequestError as error:
        return problem_page(request, 404, f"This sequence's picture is not shown: {error}")
    if found is None:
        return problem_page(request, 404, "This sequence has no such picture.")
    return Response(found.data, media_type=found.media_type)


@dataclass(frozen=True)
class Choice:
    """The part of a sequence that the address selects; `start` None: the most informative position."""

    sheet: str = "sampled"
    colour: str = "mask"
    start: int | None = None

    @classmethod
    def read(cls, asked: Mapping[str, str]) -> Choice:
        """Invalid values count as not given."""
        sheet, colour, start = asked.get("sheet", ""), asked.get("colour", ""), asked.get("start", "")
        return cls(sheet if sheet in SHEETS else "sampled", colour if colour in COLOURINGS else "mask", _whole(start))


def _whole(text: str) -> int | None:
    """Of an address; None for anything but a number of a few digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


@dataclass(frozen=True)
class Tokens:
    """One window on one sheet."""

    choice: Choice
    shown: list[Painted]
    labels: dict[int, str]  # text of the labels that differ from their token
    start: int
    total: int
    first_sampled: int
    counts: dict[str, int]
    legends: dict[str, list[Entry]]
    sheets: dict[str, str]  # the available sheets
    seq_id: str

    @property
    def end(self) -> int:
        """Position after the last one shown."""
        return self.start + len(self.shown)

    def address(self, **changes: str | int) -> str:
        """This page with changed parameters."""
        now = {"sheet": self.choice.sheet, "colour": self.choice.colour, "start": self.start}
        return f"/sequences/{url(self.seq_id)}?{urlencode(now | changes)}#tokens"

    def fresh(self, sheet: str) -> str:
        """Another sheet, at its most informative position."""
        return f"/sequences/{url(self.seq_id)}?{urlencode({'sheet': sheet, 'colour': self.choice.colour})}#tokens"


@dataclass(frozen=True)
class SequencePage:
    """Everything sequence.html.j2 shows besides the detail itself."""

    tokens: Tokens | None
    tokens_problem: str
    outcome: Outcome | None
    drawing: Drawing | None
    picture: tuple[int, int] | None  # size of the first
    picture_problem: str
    more_pictures: range = range(0)  # their numbers


async def build(runner: TaskRunner, config: Config, detail: SequenceDetail, choice: Choice) -> SequencePage:
    """`config`: this process's, which says what pictures may be read. Never raises on stored data."""
    tokens, tokens_problem = await asyncio.to_thread(_tokens, runner, detail, choice)
    result = detail.result
    if result is None:
        return SequencePage(tokens, tokens_problem, None, None, None, "")
    made = await _outcome(runner, result)
    size, picture_problem = await asyncio.to_thread(_picture_size, config, result)
    is_scene = isinstance(made, Detection) or size is not None
    drawn = drawing(made.pairs if isinstance(made, Detection) else (), size) if is_scene else None
    more = range(1, len(sources_of(result)))
    return SequencePage(tokens, tokens_problem, made, drawn, size, picture_problem, more)


async def _outcome(runner: TaskRunner, result: SequenceResult) -> Outcome:
    try:
        return await runner.steps.run(lambda: _run_task(runner, result))
    except BusyError as error:
        return Failed(f"the outcome is not shown: {error}")
    except TimeoutError:
        took = f"parse and match took more than {runner.steps.deadline_s:g} s on this sequence"
        return Failed(f"{took}, so their outcome is not shown")


def _run_task(runner: TaskRunner, result: SequenceResult) -> Outcome:
    try:
        task, context = runner.task()
    except SluiceError as error:
        return Failed(f"the run's task cannot be loaded here: {error}")
    return outcome(result, task, context)


def _picture_size(config: Config, result: SequenceResult) -> tuple[tuple[int, int] | None, str]:
    try:
        found = read_picture(config, result)
    except SluiceError as error:
        return None, str(error)
    return (found.size if found else None), ""


def _tokens(runner: TaskRunner, detail: SequenceDetail, choice: Choice) -> tuple[Tokens | None, str]:
    sheets = {"sampled": detail.result, "trained": detail.sample}
    known = {name: title for name, title in SHEETS.items() if sheets[name] is not None}
    if not known:
        return None, "This sequence ended without tokens."
    if choice.sheet not in known:
        choice = Choice(next(iter(known)), choice.colour, choice.start)
    sheet = _sheet(runner.config, detail, choice.sheet)
    try:
        codec = runner.codec()
    except SluiceError as error:
        return None, f"Tokens cannot be shown: {error}"
    total, first = len(sheet.ids), sheet.first_sampled()
    usual = max(0, first - _LEAD) if total > MOST_TOKENS else 0
    start = min(usual if choice.start is None else choice.start, max(0, total - 1))
    window, versions = sheet.window(codec, start, MOST_TOKENS), sheet.versions_seen()
    labels = {token.at: codec.decode([token.label]) for token in window if token.label is not None}
    made = Tokens(
        choice=choice,
        shown=paint(window, versions),
        labels=labels,
        start=start,
        total=total,
        first_sampled=first,
        counts=sheet.counts(),
        legends=legends(versions, [kind for kind in KINDS if kind in sheet.counts()]),
        sheets=known,
        seq_id=detail.row.seq_id,
    )
    return made, ""


def _sheet(config: Config, detail: SequenceDetail, name: str) -> Sheet:
    """A proximal logprob is needed with a policy loss, for tokens older than the weights that trained them."""
    trained = detail.trained
    scores = Scores.of(trained, detail.sample) if trained and detail.sample else None
    newest = trained.version if trained else math.inf
    needed_below = newest if config.policy.enabled else -math.inf
    if name == "trained" and detail.sample is not None:
        return trained_sheet(detail.sample, detail.result, scores, needed_below)
    if detail.result is None:
        raise ValueError("a sheet of sampled tokens needs a result")
    return sampled_sheet(detail.result, detail.sample, scores, needed_below)


def read_filter(asked: Mapping[str, str]) -> tuple[SequenceFilter, str]:
    """The filter, and its unreadable parts ("" if none)."""
    texts = {name: clean(asked.get(name, "")) for name in _TEXTS}
    version, triggered = asked.get("version", "").strip(), asked.get("triggered", "")
    problem = ""
    if version and not (version.isascii() and version.isdecimal() and len(version) <= _VERSION_DIGITS):
        problem, version = "A weight version is an integer; the filter ignores it.", ""
    wanted = SequenceFilter(
        **texts,
        version=int(version) if version else None,
        triggered={"yes": True, "no": False}.get(triggered),
    )
    return wanted, problem


def address(wanted: SequenceFilter, before: str = "") -> str:
    """`/sequences?state=dead&…`."""
    triggered = {True: "yes", False: "no", None: ""}[wanted.triggered]
    fields = msgspec.structs.asdict(wanted) | {"triggered": triggered, "before": before}
    return f"/sequences?{query(fields)}".rstrip("?")


def count_set(wanted: SequenceFilter) -> int:
    """Number of conditions."""
    return sum(value not in ("", None) for value in msgspec.structs.asdict(wanted).values())
