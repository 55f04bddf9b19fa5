"""A string- and escape-aware scanner of the answer literal, with character positions.

- Every character is looked at a bounded number of times; nesting, members and items are bounded; numbers are
  never converted here. So hostile text costs linear time and bounded memory.
- Nothing is repaired: at the first character outside the grammar the scan stops.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

MAX_DEPTH = 16
MAX_ITEMS = 64
"""Items of a list or members of an object that are kept; an object with more members is refused."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_MARK = re.compile(r'["\\]')
_BRACE_MARK = re.compile(r'["{}]')
_ATOM = re.compile(r'[^\s,\[\]{}":]+')

Kind = Literal["string", "atom", "list", "object"]


@dataclass(frozen=True)
class Value:
    """One value at characters [start, end) of the text; an atom is any bare word: 12, NaN, <|coord_12|>."""

    kind: Kind
    start: int
    end: int
    items: tuple[Value, ...] = ()  # of a list
    members: tuple[tuple[Value, Value], ...] = ()  # of an object: (key, value)


@dataclass(frozen=True)
class Member:
    """One entry of the outermost object; `body` is None when its braces close but its inside is malformed."""

    key: Value
    body: Value | None
    end: int  # characters, after the entry's value


@dataclass(frozen=True)
class Scan:
    """`closed`: the outermost brace closed within the limits."""

    members: tuple[Member, ...]
    closed: bool


def scan(text: str, max_members: int) -> Scan:
    """Read `{"key": {...}, ...}` from the start of the text, at most `max_members` complete members."""
    at = _skip(text, 0)
    members: list[Member] = []
    if not text.startswith("{", at):
        return Scan((), False)
    at = _skip(text, at + 1)
    if text.startswith("}", at):
        return Scan((), True)
    while len(members) < max_members:
        member = _member(text, at)
        if member is None:
            break
        members.append(member)
        at = _skip(text, member.end)
        if text.startswith("}", at):
            return Scan(tuple(members), True)
        if not text.startswith(",", at):
            break
        at = _skip(text, at + 1)
    return Scan(tuple(members), False)


def string_value(text: str, value: Value) -> str | None:
    """The string that a literal means; None if it is no JSON string, or holds a lone surrogate."""
    try:
        found = json.loads(text[value.start : value.end])
        found.encode("utf-8")
    except (ValueError, AttributeError):
        return None
    return found


def _member(text: str, at: int) -> Member | None:
    key = _string(text, at)
    if key is None:
        return None
    at = _skip(text, key.end)
    if not text.startswith(":", at):
        return None
    at = _skip(text, at + 1)
    if not text.startswith("{", at):
        value = read_value(text, at, len(text), MAX_DEPTH)
        unfinished = value is None or (value.kind == "atom" and value.end == len(text))
        return None if value is None or unfinished else Member(key, value, value.end)
    end = _balanced_end(text, at)
    if end is None:
        return None
    value = read_value(text, at, end, MAX_DEPTH)
    return Member(key, value if value and value.end == end else None, end)


def read_value(text: str, at: int, stop: int, depth: int) -> Value | None:
    """The value that starts at `at` and ends by `stop`; None when malformed, unfinished or too deep."""
    if at >= stop or depth <= 0:
        return None
    if text[at] == '"':
        return _string(text, at, stop)
    if text[at] == "[":
        return _list(text, at, stop, depth)
    if text[at] == "{":
        return _object(text, at, stop, depth)
    found = _ATOM.match(text, at, stop)
    return Value("atom", at, found.end()) if found else None


def _list(text: str, start: int, stop: int, depth: int) -> Value | None:
    items: list[Value] = []
    at = _skip(text, start + 1)
    if text.startswith("]", at, stop):
        return Value("list", start, at + 1)
    while True:
        item = read_value(text, at, stop, depth - 1)
        if item is None:
            return None
        if len(items) < MAX_ITEMS:
            items.append(item)
        at = _skip(text, item.end)
        if text.startswith("]", at, stop):
            return Value("list", start, at + 1, items=tuple(items))
        if not text.startswith(",", at, stop):
            return None
        at = _skip(text, at + 1)


def _object(text: str, start: int, stop: int, depth: int) -> Value | None:
    members: list[tuple[Value, Value]] = []
    at = _skip(text, start + 1)
    if text.startswith("}", at, stop):
        return Value("object", start, at + 1)
    while len(members) < MAX_ITEMS:
        key = _string(text, at, stop)
        at = _skip(text, key.end) if key else stop
        if key is None or not text.startswith(":", at, stop):
            return None
        value = read_value(text, _skip(text, at + 1), stop, depth - 1)
        if value is None:
            return None
        members.append((key, value))
        at = _skip(text, value.end)
        if text.startswith("}", at, stop):
            return Value("object", start, at + 1, members=tuple(members))
        if not text.startswith(",", at, stop):
            return None
        at = _skip(text, at + 1)
    return None


def _string(text: str, start: int, stop: int | None = None) -> Value | None:
    stop = len(text) if stop is None else stop
    if not text.startswith('"', start, stop):
        return None
    at = start + 1
    while found := _STRING_MARK.search(text, at, stop):
        if found.group() == '"':
            return Value("string", start, found.end())
        at = found.end() + 1
    return None


def _balanced_end(text: str, start: int) -> int | None:
    """The position after the brace that closes the one at `start`."""
    depth, at = 0, start
    while found := _BRACE_MARK.search(text, at):
        if found.group() == '"':
            string = _string(text, found.start())
            if string is None:
                return None
            at = string.end
            continue
        depth += 1 if found.group() == "{" else -1
        at = found.end()
        if depth == 0:
            return at
    return None


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
