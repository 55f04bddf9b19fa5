"""Why rows ended in errors, in a few lines: the first error of each kind, and how many are like it.

- Errors are of one kind when they differ only in names and numbers: rows, paths, what is quoted.
- Memory does not grow with the number of kinds: what comes after the first few is only counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MAX_KINDS = 3
_MAX_CHARACTERS = 500  # of one error
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[\d/.]\S*")


@dataclass
class _Kind:
    row: int  # the lowest
    text: str  # its error
    count: int = 0


@dataclass
class Failures:
    """The errors of a run."""

    _kinds: dict[str, _Kind] = field(default_factory=dict)
    _others: int = 0  # errors of further kinds

    def count(self, row: int, error: str) -> None:
        """One more error, of this row."""
        kind = _PARTICULAR.sub("#", error)
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._others += 1
            return
        found = self._kinds.setdefault(kind, _Kind(row, error))
        found.count += 1
        if row < found.row:
            found.row, found.text = row, error

    @property
    def first(self) -> str | None:
        """The error of the lowest row; None if there is none."""
        kinds = self._by_row()
        return _line(kinds[0]) if kinds else None

    def lines(self) -> list[str]:
        """One line for each kind, by row, and one for what further kinds there are."""
        lines = [_line(kind) + (f"; {kind.count - 1} more" if kind.count > 1 else "") for kind in self._by_row()]
        return [*lines, f"errors of other kinds: {self._others}"] if self._others else lines

    def _by_row(self) -> list[_Kind]:
        return sorted(self._kinds.values(), key=lambda kind: kind.row)


def _line(kind: _Kind) -> str:
    text = " ".join(kind.text.split())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}…"
    return text if text.startswith(f"row {kind.row}: ") else f"row {kind.row}: {text}"
