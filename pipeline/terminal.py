"""Everything a command prints goes through here, so that no output can steer the terminal.

Ids, reasons, texts and paths come from callers, models and tasks: anything that could move the cursor, hide or reorder
text, or end a line early is printed as its escape. Line feeds and tabs stay. Log lines are escaped with the same table.

A command with `--json` prints one JSON object on one line, with `schema_version`, and nothing else to stdout;
everything else goes to stderr. NaN is printed as null: JSON has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO, TextIOWrapper
from typing import IO

import msgspec
import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

_ENDS = [*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x2028, 0x2029]
_TURNS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # change the text direction
_STEERS = {code: chr(code).encode("unicode_escape").decode() for code in (*_ENDS, *_TURNS)}
_WIDEST = 10_000  # columns of an unwrapped line
_IN_JSON = {code: f"\\u{code:04x}" for code in _STEERS if code > 31}


def escaped(text: str) -> str:
    """Text with terminal control characters escaped; line feeds and tabs stay."""
    return text.translate(_STEERS)


def escaped_json(text: str) -> str:
    """The same for JSON; the result is equivalent JSON."""
    return text.translate(_IN_JSON)


def make_writable() -> None:
    """Let a command print whatever its streams are: characters that an encoding lacks as escapes, nowhere if closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `sluice … >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, until the process ends
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(text: object = "", *, end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """Like `print`, for a single text."""
    print(escaped(str(text)), end=end, file=file or sys.stdout, flush=flush)


def complain(text: object) -> None:
    """A line on stderr."""
    say(text, file=sys.stderr)


def columns(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines aligned by column, never wrapped; cells aren't parsed as markup."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*map(Text, row))
    for column in grid.columns:
        column.no_wrap = True
    console = rich.console.Console(file=StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as shown:
        console.print(grid)
    return [indent + line.rstrip() for line in shown.get().splitlines()]


class Console(rich.console.Console):
    """rich's console, with its styles and cursor moves; the content it shows is escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escaped(one.text), one.style)


def json_line(shown: msgspec.Struct | Mapping[str, object], schema_version: int | None = None) -> bytes:
    """The object as JSON; `schema_version` is for types without that field. Raises ValueError without either."""
    head = {} if schema_version is None else {"schema_version": schema_version}
    body = {**head, **msgspec.to_builtins(shown, str_keys=True)}
    if "schema_version" not in body:
        raise ValueError("a JSON object of a command needs a schema_version")
    return msgspec.json.encode(body) + b"\n"


def print_json(shown: msgspec.Struct | Mapping[str, object], schema_version: int | None = None) -> None:
    """Write `json_line` to stdout, at once."""
    sys.stdout.write(escaped_json(json_line(shown, schema_version).decode()))
    sys.stdout.flush()
