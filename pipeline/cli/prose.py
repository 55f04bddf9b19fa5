"""Docstrings of commands as help: paragraphs, and examples that can be copied.

- A line `Example: ...` with the command in backticks is an example; every other line belongs to a paragraph.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_EXAMPLE = re.compile(r"Example: `([^`]+)`$")


def paragraphs(text: str) -> list[str]:
    """Each on one line, without the examples."""
    found = [
        " ".join(line for line in block.split("\n") if not _EXAMPLE.match(line)) for block in text.strip().split("\n\n")
    ]
    return [each for each in found if each.strip()]


def examples(text: str) -> list[str]:
    """The commands, as they are typed."""
    return [found[1] for line in text.splitlines() if (found := _EXAMPLE.match(line.strip()))]


def styled(text: str) -> Text:
    """What stands in backticks is bold, and the backticks are gone."""
    from rich.text import Text

    pieces = text.split("`")
    return Text.assemble(*((piece, "bold" if at % 2 else "") for at, piece in enumerate(pieces)))
