"""Tracks the brackets and strings of JSON values in text that arrives in pieces; doesn't interpret them.

- A value begins at an opening bracket outside any value; characters before it, even quotes, are skipped.
- Brackets inside strings don't count; an escape may be split anywhere between two pieces.
- A closing bracket that doesn't match the innermost open one is skipped, as in text that isn't JSON.
"""

from __future__ import annotations

from typing import Literal

Mark = Literal["outside", "open", "close", "space", "text"]
"""What a character is: outside of any value; a bracket that opens or closes; white space between the parts of a
value; any other character of a value, that is, of its strings, numbers, names and punctuation."""

BRACKETS = "{["
SPACE = " \t\n\r"  # all that JSON allows between its parts
_PAIRS = {"}": "{", "]": "["}
_WITHOUT_SPACE = str.maketrans("", "", SPACE)


def squeeze(text: str) -> str:
    """The text without JSON's white space, including inside strings."""
    return text.translate(_WITHOUT_SPACE)


class JsonScanner:
    """`open` holds the open brackets, outermost first; `begins` those that may begin a value."""

    __slots__ = ("_escaped", "_in_string", "begins", "open")

    def __init__(self, begins: str = BRACKETS) -> None:
        self.begins = begins
        self.open: list[str] = []
        self._in_string = False
        self._escaped = False

    def push(self, char: str) -> Mark:
        """Take the next character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return "text"
        if char in (BRACKETS if self.open else self.begins):
            self.open.append(char)
            return "open"
        if not self.open:
            return "outside"
        if _PAIRS.get(char) == self.open[-1]:
            self.open.pop()
            return "close"
        self._in_string = char == '"'
        return "space" if char in SPACE else "text"

    def end_of_value(self, text: str) -> int | None:
        """Take a piece up to the bracket that closes a value; returns the length up to there, None if none closes."""
        for index, char in enumerate(text):
            if self.push(char) == "close" and not self.open:
                return index + 1
        return None

    def fork(self) -> JsonScanner:
        """A scanner in the same state, for trying out a text."""
        other = JsonScanner(self.begins)
        other.open = self.open.copy()
        other._in_string, other._escaped = self._in_string, self._escaped
        return other
