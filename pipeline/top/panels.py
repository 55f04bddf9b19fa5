"""What a look at the run found, and the parts of a frame made of it, as rich renderables.

- A look survives a broker that goes away, and state written by another release. It waits for the broker, at most
  `_LOOK_S`; then that is shown as a problem.
- Long text wraps, nothing is truncated.
"""

from __future__ import annotations

import asyncio
import shutil
import textwrap
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
from redis.exceptions import RedisError
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sluice.pipeline.broker import connection
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError, DataError, SluiceError
from sluice.pipeline.queue.dead_letters import DeadLetters, Row
from sluice.pipeline.roles import colour, position
from sluice.pipeline.status.descriptions import condition, doing, stage_text, stall_text, stepped, verdict_text
from sluice.pipeline.status.heartbeat import HIDDEN_FACTS
from sluice.pipeline.status.inspection import Verdict, inspect, verdict
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.status.snapshot import CreditUse, Process, Snapshot
from sluice.pipeline.status.stages import Rates, Stage, StageState, is_optional, stages
from sluice.pipeline.status.text import length
from sluice.pipeline.terminal import Console, escaped, say
from sluice.pipeline.wire.keys import Keys

LETTERS = 50
AWAY, UNREADABLE = "no answer from the broker", "the run's state cannot be read"
_LOOK_S = 4.0
_HASTY_S = 1.5
_LOOKS = 6  # polls that decide whether the run moves


@dataclass
class View:
    """The current state; `now` is None before the first answer."""

    run: str
    now: Snapshot | None = None
    verdict: Verdict | None = None
    rates: Rates = field(default_factory=Rates)
    letters: list[Row] = field(default_factory=list[Row])  # newest first
    trouble: str = AWAY  # AWAY or UNREADABLE, while there is a problem
    problem: str = ""  # why there is no answer, empty if there is one
    silent_since: float | None = None  # Unix s


class Feed:
    """One connection; `close` it."""

    def __init__(self, config: Config) -> None:
        settings = msgspec.structs.replace(
            config.broker, retry_for_s=_HASTY_S, socket_timeout_s=_HASTY_S, connect_timeout_s=_HASTY_S
        )
        self._config = msgspec.structs.replace(config, broker=settings)
        self._client = connection.connect(settings, config.run)
        self._letters = DeadLetters(self._client, self._config)
        self._seen: deque[Snapshot] = deque(maxlen=_LOOKS)
        self.view = View(config.run)

    async def look(self) -> View:
        """The newest state; never raises if the broker is away or something is unreadable."""
        view = self.view
        try:
            async with asyncio.timeout(_LOOK_S):
                now = await inspect(
                    self._client, Keys(self._config.run), self._config.consumer.count, run_directory(self._config)
                )
                view.letters = await self._letters.newest(count=LETTERS) if now.dead_letters else []
        except (RedisError, BrokerError, OSError, TimeoutError) as error:
            return self._trouble(AWAY, str(error) or f"no answer within {_LOOK_S:g} s")
        except (SluiceError, msgspec.MsgspecError) as error:  # written by another release, or by a foreign program
            return self._trouble(UNREADABLE, str(error))
        view.problem, view.silent_since = "", None
        self._seen.append(now)
        view.verdict = verdict(self._seen[0], now)
        view.now = now
        view.rates.add(now)
        return view

    def _trouble(self, trouble: str, problem: str) -> View:
        view = self.view
        if trouble != view.trouble or view.silent_since is None:
            view.trouble, view.silent_since = trouble, time.time()
        view.problem = problem
        return view

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


_STYLE: dict[StageState, str] = {
    "working": "green", "waiting": "", "stalled": "bold red", "done": "dim", "off": "dim",
}  # fmt: skip
_BARS = " ▁▂▃▄▅▆▇█"
_SPARK = 16
_HEAD_CHARS = 140  # two lines; the page `why` has the full text


def head(view: View) -> RenderableType:
    """The run, the broker's silence if any, the flow with counts, rates, and the verdict."""
    now = view.now
    if now is None:
        return _text(f"run {view.run}\n{_silence(view) or 'looking …'}")
    version = "no weights yet" if now.latest_version is None else f"weights v{now.latest_version}"
    title = _text(f"run {now.run}: {condition(now)}, {version}, version lag {now.version_lag}", style="bold")
    lines: list[RenderableType] = [title, _text(_counts(now)), _flow(view, now), _text(_rates(view))]
    if view.problem:
        return Group(*lines, _text(_silence(view), style="bold red"))
    return Group(*lines, _verdict(view))


def why(view: View) -> RenderableType:
    """Each stall: what, since when, remedy."""
    now = view.now
    if now is None or not now.stalls:
        return _text("nothing blocks the run")
    table = Table.grid(padding=(0, 1))
    for number, stall in enumerate(now.stalls, 1):
        since = "" if stall.since is None else f" (for {length(now.at - stall.since)})"
        told = stall_text(now, stall)
        table.add_row(f"{number}.", _text(told.says + since, style="bold red" if stall.blocks else "yellow"))
        table.add_row("", _text(f"do: {told.remedy}" if stall.blocks else told.remedy))
    return table


def stage_rows(view: View) -> RenderableType:
    """One row per stage, with its sentence."""
    table = _table("stage", "state", "what it does, or waits for")
    now = view.now
    for stage in stages(now, view.rates) if now else []:
        style = _STYLE[stage.state]
        says = stage_text(now, stage).says if now else ""
        table.add_row(_text(stage.name, colour(stage.name)), _text(stage.state, style), _text(says, style))
    return table


def process_rows(view: View) -> RenderableType:
    """One row per process, in the order of the flow."""
    table = _table("process", "what it does, or waits for; what it counts")
    rows = view.now.processes if view.now else []
    for row in sorted(rows, key=lambda row: (position(row.role), row.name)):
        facts = ", ".join(f"{key} {_short(value)}" for key, value in row.facts.items() if key not in HIDDEN_FACTS)
        table.add_row(
            _text(row.name, colour(row.role)), Text.assemble(_doing(row), _text(f"\n{facts}" if facts else "", "dim"))
        )
    return table if rows else _text("no process has reported within the last hour")


def letter_rows(view: View) -> RenderableType:
    """The newest dead letters."""
    if not view.letters:
        return _text("no dead letters")
    lines: list[RenderableType] = []
    for row in view.letters:
        letter = row.letter
        age = f", {length(max(0.0, time.time() - letter.at))} ago" if letter.at else ""
        lines.append(Text.assemble(_text(letter.seq_id, "bold"), _text(f"  {letter.reason}{age}")))
        lines.append(Padding(_text(letter.detail[:400] or "no detail"), (0, 0, 0, 2), expand=False))
    total = view.now.dead_letters if view.now else len(view.letters)
    more = f"the newest {LETTERS} of {total:,}; " if total > LETTERS else ""
    return Group(*lines, _text(f"{more}`sluice dlq show ID`, `sluice dlq replay`, `sluice dlq drop`", style="dim"))


def _doing(row: Process) -> Text:
    if row.ended_at is not None:
        return _text(f"failed {length(row.age_s)} ago: {row.error}", style="bold red")
    if not row.is_alive:
        return _text(f"no heartbeat for {length(row.age_s)}", style="red")
    return _text("at work", style="green") if row.wait is None else _text(doing(row))


def _verdict(view: View) -> Text:
    now, told = view.now, view.verdict
    if now is None or told is None:
        return _text("")
    blocking = [stall for stall in now.stalls if stall.blocks]
    if not blocking:
        return _text(verdict_text(now, told), style="green" if told.state in ("moving", "working", "complete") else "")
    more = f" (and {len(blocking) - 1} more: see why)" if len(blocking) > 1 else ""
    says = textwrap.shorten(stall_text(now, blocking[0]).says, _HEAD_CHARS, placeholder=" … (see why)")
    return _text(f"! {says}{more}", style="bold red")


def _silence(view: View) -> str:
    if not view.problem:
        return ""
    since = length(time.time() - (view.silent_since or time.time()))
    return f"! {view.trouble} for {since}: {view.problem}. Showing the last known state; retrying."


def _counts(now: Snapshot) -> str:
    total = f" of {now.total:,}" if now.total is not None else ""
    return (
        f"enqueued {now.enqueued:,}{total} = trained {now.trained:,}{stepped(now, brief=True)} + dead {now.dead:,} "
        f"+ dropped {now.dropped:,} + in flight {now.credit.sequences:,}"
    )


def _flow(view: View, now: Snapshot) -> Table:
    """How much each stage holds and how fast it goes, along the flow; without stages that this run doesn't use."""
    shown = [stage for stage in stages(now, view.rates) if stage.state != "off" or not is_optional(stage.name)]
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, header_style="dim")
    for stage in shown:
        table.add_column(stage.name, justify="right", no_wrap=True)
    table.add_row(*(_text(_held(stage), style=_STYLE[stage.state]) for stage in shown))
    table.add_row(*(_text(_rate(stage)) for stage in shown), style="dim")
    return table


def _held(stage: Stage) -> str:
    if stage.name == "weights":
        return "none" if stage.count is None else f"v{stage.count}"
    return f"{stage.count or 0:,}"


def _rate(stage: Stage) -> str:
    if stage.rate is None:
        return ""
    per_s, unit = stage.rate
    return f"{per_s:,.1f}{'t/s' if unit == 'tok/s' else '/s'}"


def _rates(view: View) -> str:
    rates, now = view.rates, view.now
    eta = "-" if rates.eta_s is None else "done" if now is not None and now.complete else length(rates.eta_s)
    per_s = f"tokens/s {rates.per_s('tokens'):,.0f}  trained/s {rates.per_s('trained'):,.1f}  ETA {eta}"
    use = CreditUse() if now is None else now.credit
    limit = "" if use.max_sequences is None else f" of {use.max_sequences:,}"
    return f"{per_s}  credit {use.sequences:,}{limit}  {_spark(rates.series('tokens'))}"


def _spark(series: list[float]) -> str:
    shown = series[-_SPARK:]
    top = max(shown, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in shown) if top > 0 else ""


def _short(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True, show_edge=False, header_style="dim")
    for number, name in enumerate(columns):
        table.add_column(name, ratio=1 if number == len(columns) - 1 else None, overflow="fold")
    return table


def _text(text: str, style: str = "") -> Text:
    """Not parsed as markup, and can't steer the terminal: much of it comes from tasks and callers."""
    return Text(escaped(text), style=style)


_APART_S = 1.0


def frame(view: View, width: int) -> str:
    """Everything that the screen can show, one part below the other."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as said:
        console.print(head(view))
        shown = [("why", why), ("stages", stage_rows), ("processes", process_rows)]
        for name, part in [*shown, ("dead letters", letter_rows)]:
            console.print(f"\n{name}", highlight=False)
            console.print(part(view))
    return "\n".join(line.rstrip() for line in said.get().splitlines())


def print_once(config: Config, apart_s: float = _APART_S) -> None:
    """Polls twice, so that there are rates.

    Raises BrokerError if the broker doesn't answer, and DataError if the state can't be read.
    """
    view = asyncio.run(_look_twice(config, apart_s))
    if view.problem and view.trouble == UNREADABLE:
        raise DataError(f"{UNREADABLE} ({view.problem}); use the release that runs it")
    if view.problem:
        raise BrokerError(f"the broker does not answer ({view.problem}); start it, or set REDIS_URL to a running one")
    say(frame(view, shutil.get_terminal_size((80, 24)).columns))


async def _look_twice(config: Config, apart_s: float) -> View:
    feed = Feed(config)
    try:
        if not (await feed.look()).problem:
            await asyncio.sleep(apart_s)
            await feed.look()
        return feed.view
    finally:
        await feed.close()
