"""Whether a run moves, judged from two snapshots of it; `sluice status --why`.

- It stands still when something keeps it that does not end by itself, or when nothing moved, something keeps it and
  no process is at work.
- A process that is at work (a step, a long sequence) counts as movement to come.
"""

from __future__ import annotations

import asyncio
import shutil
import textwrap
import time
from typing import Literal

import msgspec

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.connection import BrokerSilent
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.snapshot import Process, Snapshot, Stall, snapshot
from sluice.pipeline.status.text import condition, counted, length
from sluice.pipeline.wire.keys import Keys

_COUNTS = ("tokens", "enqueued", "committed", "accepted", "trained", "dead", "dropped")
_WORDS = {"committed": "decoded", "accepted": "handed on"}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `sluice status --why` says first."""

    state: Literal["complete", "idle", "moving", "working", "waiting", "stalled"]
    says: str
    moved: dict[str, int] = {}  # what was counted between the two looks
    over_s: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether nobody has to do anything."""
        return self.state != "stalled"


def verdict(before: Snapshot, now: Snapshot) -> Verdict:
    """`now` is a close look, with its stalls."""
    over_s = max(0.0, now.at - before.at)
    moved = {name: count for name in _COUNTS if (count := int(getattr(now, name) - getattr(before, name))) > 0}
    if now.latest_version != before.latest_version:
        moved["versions"] = (now.latest_version or 0) - (before.latest_version or 0) or 1
    state, says = _state(now, moved, f"{over_s:.1f} s")
    return Verdict(state=state, says=says, moved=moved, over_s=round(over_s, 3))


def _state(
    now: Snapshot, moved: dict[str, int], within: str
) -> tuple[Literal["complete", "idle", "moving", "working", "waiting", "stalled"], str]:
    if now.complete:
        return "complete", "the run is complete: nothing is left to do"
    if not (now.enqueued or now.processes):
        return "idle", "nothing was enqueued under this name and no process is alive: is it the run's name?"
    busy = [row.name for row in now.processes if _works(row)]
    blocking = [stall for stall in now.stalls if stall.blocks]
    seen = f"{_list(moved)} within {within}" if moved else f"nothing was counted within {within}"
    if blocking or (now.stalls and not moved and not busy):
        causes = counted(len(blocking or now.stalls), "cause")
        how = "it still moves, and will stop" if moved else "it stands still"
        return "stalled", f"{how}: {causes}, below; {seen}"
    if moved:
        return "moving", f"it moves: {seen}"
    if busy:
        return "working", f"it works: {seen}, and {busy[0]} is at work"
    return "waiting", f"it waits: {seen}, every process waits, and nothing that is known keeps them"


def _works(row: Process) -> bool:
    return row.is_alive and row.waiting_for is None and not row.is_onlooker


def _list(moved: dict[str, int]) -> str:
    others = ((_WORDS.get(name, name), count) for name, count in moved.items() if name not in ("tokens", "versions"))
    words = [f"{count:,} {name}" for name, count in others]
    if "tokens" in moved:
        words.insert(0, counted(moved["tokens"], "token"))
    if "versions" in moved:
        words.append(counted(moved["versions"], "new version of the weights", "new versions of the weights"))
    return ", ".join(words)


APART_S = 1.0  # the two looks
_ANSWER_S = 3.0  # a broker that is there answers sooner
_DEADLINE_S = 15.0
_WIDTH = 100


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What the two looks gave."""

    now: Snapshot
    verdict: Verdict


def look_twice(config: Config, apart_s: float = APART_S) -> Why:
    """Raises BrokerError, within seconds, that says what to do where the broker does not answer."""
    settings = msgspec.structs.replace(
        config.broker, retry_for_s=_ANSWER_S, socket_timeout_s=_ANSWER_S, connect_timeout_s=_ANSWER_S
    )
    hasty = msgspec.structs.replace(config, broker=settings)
    try:
        connection.ping(hasty.broker, config.run)
    except BrokerSilent as error:
        patience = f"{config.broker.retry_for_s:g} s"
        raise BrokerError(
            f"{error}. Every process of the run waits for it for up to {patience} (broker.retry_for_s), and goes on "
            "where it was once it is back"
        ) from error
    return asyncio.run(_look_twice(hasty, apart_s))


async def _look_twice(config: Config, apart_s: float) -> Why:
    client, keys = connection.connect(config.broker, config.run), Keys(config.run)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            before = await snapshot(client, keys)
            await asyncio.sleep(0 if before.complete else apart_s)
            now = await inspect(client, keys, config.consumer.count)
            return Why(now=now, verdict=verdict(before, now))
    except TimeoutError as error:
        raise BrokerError(
            f"the broker is too slow: it did not answer a look at the run within {_DEADLINE_S:g} s; is its machine "
            "overloaded, or does it swap?"
        ) from error
    finally:
        await client.aclose()


def as_json(why: Why) -> dict[str, object]:
    """The snapshot's fields, and `verdict`."""
    return {**msgspec.to_builtins(why.now, str_keys=True), "verdict": msgspec.to_builtins(why.verdict)}


def as_text(why: Why, width: int | None = None) -> str:
    """The verdict, then each stall: what, since when, what to do; then what each process says of itself."""
    width = min(_WIDTH, width or shutil.get_terminal_size((_WIDTH, 24)).columns)
    lines = [f"run {why.now.run}: {condition(why.now)}", *_wrapped(why.verdict.says, width, "  ", "  ")]
    for number, stall in enumerate(why.now.stalls, 1):
        lines += ["", *_told(number, stall, why.now.at, width)]
    said = [(row.name, row.waiting_for, row.waiting_s) for row in why.now.processes if row.is_alive]
    if said and not why.now.complete:
        lines += ["", "what each process says"]
    for name, cause, waited_s in said if not why.now.complete else []:
        doing = "is at work" if cause is None else f"waits for {cause}, {length(waited_s or 0)}"
        lines += _wrapped(f"{name} {doing}", width, "  ", "    ")
    return "\n".join(lines)


def _told(number: int, stall: Stall, now_s: float, width: int) -> list[str]:
    lines = _wrapped(stall.says, width, f"{number}. ", "   ")
    if stall.since is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stall.since))
        lines.append(f"   since:  {clock} ({length(now_s - stall.since)})")
    if not stall.blocks:
        lines.append("   this ends by itself as long as the rest goes on")
    return lines + _wrapped(stall.remedy, width, "   do:     ", "           ")


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
