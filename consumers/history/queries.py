"""A filter as SQL, and a page's cursor.

- A cursor says for each file the number below which the next page goes on: rows that come later, or that are pruned,
  neither repeat nor hide another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from consumers.history.records import SequenceFilter
from pipeline.errors import DataError

_END = 1 << 62


def conditions(wanted: SequenceFilter) -> tuple[str, list[Any]]:
    """`and …` over the table `sequences`, and its arguments."""
    text, args = "", list[Any]()
    # What no index finds goes through the whole table; by way of an index that takes several times as long.
    plus = "+" if wanted.version is not None or wanted.search else ""
    if wanted.job_id:
        text, args = f"{text} and job_id = ?", [*args, wanted.job_id]
    for name in ("state", "finish_reason", "worker", "task"):
        if value := getattr(wanted, name):
            text, args = f"{text} and {plus}{name} = ?", [*args, value]
    if wanted.triggered is not None:
        text, args = f"{text} and {plus}triggered = ?", [*args, int(wanted.triggered)]
    if wanted.version is not None:
        text, args = f"{text} and version_min <= ? and version_max >= ?", [*args, wanted.version, wanted.version]
    if wanted.search:
        text, args = f"{text} and instr(seq_id, ?) > 0", [*args, wanted.search]
    return text, args


def distinct(column: str) -> str:
    """All values of an indexed column of `sequences`, one look into the index each."""
    return (
        f"with recursive seen(value) as (select min({column}) from sequences union all"
        f" select (select min({column}) from sequences where {column} > seen.value) from seen"
        " where seen.value is not null) select value from seen where value is not null and value <> ''"
    )


class Cursor:
    """Per file the number below which to go on."""

    def __init__(self, text: str = "") -> None:
        self._below: dict[str, int] = {}
        for part in text.split(".") if text else ():
            name, _, number = part.rpartition("_")
            if not number.isdecimal() or len(number) > 18:
                raise DataError(f"{text[:80]!r} is no place in a list; begin at the first page")
            self._below[name] = int(number)

    def below(self, file: str) -> int:
        """Of a file that the page before did not know: nothing."""
        return self._below.get(file, 0 if self._below else _END)

    def after(self, files: Mapping[str, Sequence[int]], taken: Mapping[str, int]) -> str:
        """The cursor behind a page: `files` as (newest first) numbers that were found, `taken` how many were used."""
        below = dict(self._below)
        for name, numbers in files.items():
            if used := taken.get(name, 0):
                below[name] = numbers[used - 1]
            else:  # what comes into an empty one meanwhile is newer than this page
                below[name] = numbers[0] + 1 if numbers else 0
        return ".".join(f"{name}_{number}" for name, number in sorted(below.items()))
