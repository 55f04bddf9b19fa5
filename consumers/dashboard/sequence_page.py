"""Everything that the page of one sequence shows, made of what the history holds.

- What cannot be made (no tokenizer, a task that fails or takes too long, a picture that is gone) is said in its
  place; the rest of the page stands.
- At most MOST_TOKENS tokens are drawn at once, whatever the address asks for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from consumers.dashboard.sequence_colours import COLOURINGS, KINDS, Entry, Painted, legends, paint
from consumers.dashboard.sequence_desk import Desk
from consumers.dashboard.sequence_outcome import Detection, Failed, Outcome, outcome
from consumers.dashboard.sequence_picture import read_picture
from consumers.dashboard.sequence_scene import Scene, scene
from consumers.dashboard.sequence_tokens import Scores, Sheet, sampled_sheet, trained_sheet
from consumers.dashboard.step_threads import BusyError
from consumers.dashboard.words import url
from consumers.history.records import SequenceDetail
from pipeline.config.types import Config
from pipeline.errors import SluiceError
from pipeline.wire.messages import SequenceResult

MOST_TOKENS = 500
_LEAD = 40  # prompt tokens before the first sampled one, where the page has to begin somewhere
SHEETS = {"sampled": "What was sampled", "trained": "What is trained on"}


@dataclass(frozen=True)
class Choice:
    """What of a sequence the address asks for; `start` None: wherever it is most telling."""

    sheet: str = "sampled"
    colour: str = "mask"
    start: int | None = None

    @classmethod
    def read(cls, asked: Mapping[str, str]) -> Choice:
        """Values that make no sense count as not given."""
        sheet, colour, start = asked.get("sheet", ""), asked.get("colour", ""), asked.get("start", "")
        return cls(
            sheet if sheet in SHEETS else "sampled",
            colour if colour in COLOURINGS else "mask",
            int(start) if start.isascii() and start.isdecimal() and len(start) < 10 else None,
        )


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
    sheets: dict[str, str]  # that there are
    seq_id: str

    @property
    def end(self) -> int:
        """Position after the last one shown."""
        return self.start + len(self.shown)

    def address(self, **changes: str | int) -> str:
        """This page with another choice."""
        now = {"sheet": self.choice.sheet, "colour": self.choice.colour, "start": self.start}
        return f"/sequences/{url(self.seq_id)}?{urlencode(now | changes)}#tokens"

    def fresh(self, sheet: str) -> str:
        """Another sheet, from where it is most telling."""
        return f"/sequences/{url(self.seq_id)}?{urlencode({'sheet': sheet, 'colour': self.choice.colour})}#tokens"


@dataclass(frozen=True)
class SequencePage:
    """What sequence.html.j2 shows besides the detail itself."""

    tokens: Tokens | None
    tokens_problem: str
    outcome: Outcome | None
    scene: Scene | None
    picture: tuple[int, int] | None  # its size
    picture_problem: str


async def build(desk: Desk, config: Config, detail: SequenceDetail, choice: Choice) -> SequencePage:
    """`config`: of this process, which says what pictures may be read. Never raises for what is stored."""
    tokens, tokens_problem = await asyncio.to_thread(_tokens, desk, detail, choice)
    result = detail.result
    if result is None:
        return SequencePage(tokens, tokens_problem, None, None, None, "")
    made = await _outcome(desk, result)
    size, picture_problem = await asyncio.to_thread(_picture_size, config, result)
    is_scene = isinstance(made, Detection) or size is not None
    drawn = scene(made.things if isinstance(made, Detection) else (), size) if is_scene else None
    return SequencePage(tokens, tokens_problem, made, drawn, size, picture_problem)


async def _outcome(desk: Desk, result: SequenceResult) -> Outcome:
    try:
        return await desk.steps.run(lambda: _run_task(desk, result))
    except BusyError as error:
        return Failed(f"the outcome is not shown: {error}")
    except TimeoutError:
        took = f"parse and match took more than {desk.steps.deadline_s:g} s on this sequence"
        return Failed(f"{took}, so their outcome is not shown")


def _run_task(desk: Desk, result: SequenceResult) -> Outcome:
    try:
        task, context = desk.task()
    except SluiceError as error:
        return Failed(f"the run's task cannot be loaded here: {error}")
    return outcome(result, task, context)


def _picture_size(config: Config, result: SequenceResult) -> tuple[tuple[int, int] | None, str]:
    try:
        found = read_picture(config, result)
    except SluiceError as error:
        return None, str(error)
    return (found.size if found else None), ""


def _tokens(desk: Desk, detail: SequenceDetail, choice: Choice) -> tuple[Tokens | None, str]:
    sheets = {"sampled": detail.result, "trained": detail.sample}
    known = {name: title for name, title in SHEETS.items() if sheets[name] is not None}
    if not known:
        return None, "This sequence ended without tokens."
    if choice.sheet not in known:
        choice = Choice(next(iter(known)), choice.colour, choice.start)
    sheet = _sheet(desk.config, detail, choice.sheet)
    try:
        codec = desk.codec()
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
    """A proximal logprob is needed where the policy loss is on, of tokens older than the weights that trained them."""
    trained = detail.trained
    scores = Scores.of(trained, detail.sample) if trained and detail.sample else None
    newest = trained.version if trained else math.inf
    needed_below = newest if config.policy.enabled else -math.inf
    if name == "trained" and detail.sample is not None:
        return trained_sheet(detail.sample, detail.result, scores, needed_below)
    if detail.result is None:
        raise ValueError("a sheet of sampled tokens needs a result")
    return sampled_sheet(detail.result, detail.sample, scores, needed_below)
