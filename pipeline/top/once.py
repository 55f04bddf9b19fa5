"""`sluice top --once`: one frame as plain text, for logs and tests."""

from __future__ import annotations

import asyncio
import shutil

from pipeline.config import Config
from pipeline.errors import BrokerError, DataError
from pipeline.terminal import Console, say
from pipeline.top import parts
from pipeline.top.feed import UNREADABLE, Feed, View

_APART_S = 1.0


def frame(view: View, width: int) -> str:
    """Everything that the screen can show, one part below the other."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as said:
        console.print(parts.head(view))
        shown = [("why", parts.why), ("stages", parts.stage_rows), ("processes", parts.process_rows)]
        for name, part in [*shown, ("dead letters", parts.letter_rows)]:
            console.print(f"\n{name}", highlight=False)
            console.print(part(view))
    return "\n".join(line.rstrip() for line in said.get().splitlines())


def print_once(config: Config, apart_s: float = _APART_S) -> None:
    """Two looks, so that there are rates.

    Raises BrokerError when the broker does not answer, and DataError for a state that cannot be read.
    """
    view = asyncio.run(_look_twice(config, apart_s))
    if view.problem and view.trouble == UNREADABLE:
        raise DataError(f"{UNREADABLE} ({view.problem}); look with the release that runs it")
    if view.problem:
        raise BrokerError(f"the broker does not answer ({view.problem}); start it, or set REDIS_URL to one that runs")
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
