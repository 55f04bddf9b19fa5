"""All that a command prints goes through here, so that nothing in it steers the terminal.

- Ids, reasons, texts and paths were written by callers, models and tasks: what could move the cursor, hide or reorder
  text, or end a line early is printed as its escape. Line feeds and tabs stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.escaping import escaped


def say(text: object = "", *, end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """As `print`, of one text."""
    print(escaped(str(text)), end=end, file=file or sys.stdout, flush=flush)


def complain(text: object) -> None:
    """A line on stderr."""
    say(text, file=sys.stderr)


class Console(rich.console.Console):
    """rich's, whose styles and cursor moves are its own: what it is given to show is escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escaped(one.text), one.style)
