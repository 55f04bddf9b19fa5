"""A slow, separate account of what a repeated object is, to hold the processor against."""

from __future__ import annotations

import re

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\]:,]|[^ \t\n\r{}\[\]:,"]+', re.DOTALL)
_OPENER = {"}": "{", "]": "["}


def num_repeats(text: str) -> int:
    """How many complete objects of the text equal an earlier one directly inside the same array or object."""
    at = min((found for found in map(text.find, "{[") if found >= 0), default=-1)
    if at < 0:
        return 0
    parts = [match.group() for match in _PARTS.finditer(text, at)]
    opened: list[tuple[int, list[list[str]]]] = []  # where, and the objects inside
    repeats = 0
    for number, part in enumerate(parts):
        if part in ("{", "["):
            opened.append((number, []))
        elif part in _OPENER and parts[opened[-1][0]] == _OPENER[part]:
            start, _ = opened.pop()
            if not opened:
                return repeats + num_repeats("".join(_rest(text, at, number)))
            if part == "}":
                siblings = opened[-1][1]
                repeats += parts[start : number + 1] in siblings
                siblings.append(parts[start : number + 1])
    return repeats


def _rest(text: str, at: int, number: int) -> str:
    """The text after its part `number`, counted from `at`."""
    return text[[match.end() for match in _PARTS.finditer(text, at)][number] :]
