"""`sluice status --why`: two looks at a run, and what keeps it. It only reads, and never waits for long."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
import time

import msgspec

from pipeline import broker
from pipeline.broker import BrokerSilent
from pipeline.config import Config
from pipeline.errors import BrokerError
from pipeline.keys import Keys
from pipeline.status import Snapshot, snapshot
from pipeline.status_inspect import inspect
from pipeline.status_parts import Stall
from pipeline.status_words import condition, length
from pipeline.verdict import Verdict, verdict

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
        broker.ping(hasty.broker, config.run)
    except BrokerSilent as error:
        patience = f"{config.broker.retry_for_s:g} s"
        raise BrokerError(
            f"{error}. Every process of the run waits for it for up to {patience} (broker.retry_for_s), and goes on "
            "where it was once it is back"
        ) from error
    return asyncio.run(_look_twice(hasty, apart_s))


async def _look_twice(config: Config, apart_s: float) -> Why:
    client, keys = broker.connect(config.broker, config.run), Keys(config.run)
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
