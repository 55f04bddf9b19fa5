"""The sequence browser: the filtered list, one sequence, and its picture.

- The list shows prompts with their answers, newest first from the history itself; searched by text, sorted, or bounded
  by reward or length it comes from the history's index, which may be a little behind and then says so.
- The list is a plain form; with scripts, htmx fetches just the table while you type, and updates the address. Values
  in an address are truncated, never trusted; unreadable ones are ignored, and the page says so.
- Everything that blocks (SQLite, tokenizer, the task's steps, files) runs in threads; a task's steps have a deadline.
- Anything that fails (no tokenizer, a task that fails or takes too long, a missing picture) is replaced by a message;
  the rest of the page is unaffected.
- At most MOST_TOKENS tokens are drawn at once, whatever the address requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.outcome import BusyError, Detection, Failed, Outcome, TaskRunner, outcome, runner_of
from sluice.consumers.dashboard.picture import Drawing, drawing, read_picture, sources_of
from sluice.consumers.dashboard.render import MOST_CURSOR, checked_id, clean, problem_page, query, render, url
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
from sluice.consumers.history.index import SORTS, Context
from sluice.consumers.history.records import SequenceDetail, SequenceFilter, SequenceRow
from sluice.consumers.history.waterfall import Bar, SequenceTrace, longest, trace_of
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError, RequestError, SluiceError
from sluice.pipeline.wire.messages import SequenceResult

ROWS = 25
_INDEX_S = 0.1  # of one request, if the index is behind
_PICTURES = re.compile(r"(?:<[^<>\s]{0,40}(?:image|vision|img)[^<>\s]{0,40}>…?\s*)+", re.IGNORECASE)
_TEMPLATE = re.compile(r"<\|[^|<>]{1,40}\|>(?:(?:system|user|assistant|tool)\n)?")
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
    monitor, given = monitor_of(request), request.query_params
    asked = Asked.read(given)
    before = given.get("before", "")[:MOST_CURSOR]
    listed = await asyncio.to_thread(_listed, monitor, asked, before)
    values = {
        "wanted": asked.wanted,
        "asked": asked,
        "problem": listed.problem or asked.problem,
        "groups": grouped(listed.rows, listed.contexts),
        "behind": listed.behind,
        "older": asked.address(listed.next) if listed.next else "",
        "newest": asked.address() if before else "",
        "conditions": asked.conditions,
        "sorts": SORTS,
    }
    if request.headers.get("HX-Target") == "found":
        answer = render(request, "sequences_table.html.j2", **values)
        answer.headers["HX-Push-Url"] = asked.address(before)
    else:
        choices = await asyncio.to_thread(monitor.reader.choices)
        totals = await asyncio.to_thread(monitor.reader.totals)
        answer = render(request, "sequences.html.j2", **values, choices=choices, totals=totals)
    answer.headers["Vary"] = "HX-Target"
    return answer


class Listed(NamedTuple):
    """One page of the list; `behind`: sequences that could not be searched yet."""

    rows: list[SequenceRow]
    contexts: dict[str, Context]
    next: str = ""
    behind: int = 0
    problem: str = ""


class Answers(NamedTuple):
    """Sequences of one job that follow each other in the list."""

    job_id: str
    size: int
    prompt: str
    truth: str
    rows: list[SequenceRow]


def _listed(monitor: Monitor, asked: Asked, before: str) -> Listed:
    """Newest first straight from the history; sorted or searched by its index."""
    if asked.needs_index:
        listed = _found(monitor, asked, before)
    else:
        page = monitor.reader.sequences(asked.wanted, ROWS, before)
        listed = Listed(page.rows, {}, page.next)
    firsts = [next(rows).seq_id for _, rows in groupby(listed.rows, lambda row: row.job_id)]
    return listed._replace(contexts=monitor.index.contexts(firsts))


def _found(monitor: Monitor, asked: Asked, before: str) -> Listed:
    skip = int(before) if before.isascii() and before.isdecimal() and len(before) < 7 else 0
    if before and not skip:
        raise DataError(f"{before[:80]!r} is not a position in the list; start at the first page")
    behind = monitor.index.catch_up(_INDEX_S)
    try:
        found = monitor.index.find(asked.wanted, asked.text, asked.sort, ROWS + 1, skip, asked.ranges)
    except DataError as error:
        return Listed([], {}, problem=f"{error}.".capitalize())
    rows = [row for _, row in monitor.index.rows(found[:ROWS])]
    return Listed(rows, {}, str(skip + ROWS) if len(found) > ROWS else "", behind)


def grouped(rows: Sequence[SequenceRow], contexts: Mapping[str, Context]) -> list[Answers]:
    """In the order of the rows."""
    found: list[Answers] = []
    for job_id, members in groupby(rows, lambda row: row.job_id):
        some = list(members)
        context = contexts.get(some[0].seq_id, Context(""))
        found.append(Answers(job_id, some[0].group_size, plain(context.prompt), truth_text(context.truth), some))
    return found


def plain(prompt: str) -> str:
    """A prompt without its template's special tokens, for one line."""
    return " ".join(_TEMPLATE.sub(" ", _PICTURES.sub(" [picture] ", prompt)).split())


def truth_text(truth: Any) -> str:
    """In one line; "" for none."""
    if truth is None or isinstance(truth, str):
        return truth or ""
    try:
        return json.dumps(truth, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON doesn't have, or nested too deeply
        return "(cannot be shown in a line)"


@router.get("/sequences/{seq_id:path}")
async def sequence(request: Request, seq_id: str) -> Response:
    monitor = monitor_of(request)
    detail = await asyncio.to_thread(monitor.reader.sequence, checked_id(seq_id))
    if detail is None:
        return problem_page(request, 404, _GONE)
    resolved = await asyncio.to_thread(monitor.run_config.read)
    runner = runner_of(request.app.state, resolved.config)
    page = await build(runner, monitor.config, detail, Choice.read(request.query_params))
    page = replace(page, trace=await asyncio.to_thread(_trace, monitor, resolved.config, detail))
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


def _trace(monitor: Monitor, config: Config, detail: SequenceDetail) -> SequenceTrace | None:
    try:
        return trace_of(monitor.directory, monitor.reader, detail, Path(config.model.path).name)
    except DataError:  # a history that is being replaced: the rest of the page is of what was read before
        return None


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
    trace: SequenceTrace | None = None

    @property
    def longest(self) -> Bar | None:
        """Of what took time."""
        return longest(self.trace.bars) if self.trace else None

    @property
    def whole_s(self) -> float:
        """Length of the axis."""
        return max(self.trace.seconds if self.trace else 0.0, 1e-6)


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
    sample = detail.as_trained
    scores = Scores.of(trained, sample) if trained and sample else None
    newest = trained.version if trained else math.inf
    needed_below = newest if config.policy.enabled else -math.inf
    if name == "trained" and sample is not None:
        return trained_sheet(sample, detail.result, scores, needed_below)
    if detail.result is None:
        raise ValueError("a sheet of sampled tokens needs a result")
    return sampled_sheet(detail.result, sample, scores, needed_below)


@dataclass(frozen=True)
class Asked:
    """What an address asks of the list; `problem` says which parts of it can't be read."""

    wanted: SequenceFilter
    text: str = ""
    sort: str = "newest"
    ranges: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Asked:
        """Unreadable parts count as not given."""
        texts = {name: clean(given.get(name, "")) for name in _TEXTS}
        version, triggered = given.get("version", "").strip(), given.get("triggered", "")
        problem = ""
        if version and not (version.isascii() and version.isdecimal() and len(version) <= _VERSION_DIGITS):
            problem, version = "A weight version is an integer; the filter ignores it.", ""
        wanted = SequenceFilter(
            **texts,
            version=int(version) if version else None,
            triggered={"yes": True, "no": False}.get(triggered),
        )
        ranges: dict[str, tuple[float | None, float | None]] = {}
        for name in ("reward", "length"):
            bounds = [given.get(f"{name}_{end}", "").strip() for end in ("min", "max")]
            numbers = [_real(bound) for bound in bounds]
            if any(bound and number is None for bound, number in zip(bounds, numbers, strict=True)):
                problem = f"A bound of the {name} is a number; the filter ignores it."
            if any(number is not None for number in numbers):
                ranges[name] = (numbers[0], numbers[1])
        sort = given.get("sort", "")
        return cls(wanted, clean(given.get("text", "")), sort if sort in SORTS else "newest", ranges, problem)

    @property
    def needs_index(self) -> bool:
        """Whether the history itself can't answer it."""
        return bool(self.text or self.ranges or self.sort != "newest")

    @property
    def conditions(self) -> int:
        """How many."""
        return (
            sum(value not in ("", None) for value in msgspec.structs.asdict(self.wanted).values())
            + bool(self.text)
            + len(self.ranges)
        )

    def bound(self, name: str, end: int) -> str:
        """For the form."""
        value = self.ranges.get(name, (None, None))[end]
        return "" if value is None else f"{value:g}"

    def address(self, before: str = "") -> str:
        """`/sequences?state=dead&…`."""
        triggered = {True: "yes", False: "no", None: ""}[self.wanted.triggered]
        fields: dict[str, object] = {"text": self.text, **msgspec.structs.asdict(self.wanted), "triggered": triggered}
        for name in self.ranges:
            fields |= {f"{name}_min": self.bound(name, 0), f"{name}_max": self.bound(name, 1)}
        fields |= {"sort": "" if self.sort == "newest" else self.sort, "before": before}
        return f"/sequences?{query(fields)}".rstrip("?")


def _real(text: str) -> float | None:
    try:
        number = float(text) if len(text) < 20 else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
