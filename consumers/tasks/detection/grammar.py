"""The grammars of the answer literal, and their string- and escape-aware scanner, with character positions.

| `rollout_matching.grammar` | literal                                                                    |
|----------------------------|----------------------------------------------------------------------------|
| `object_n` (default)       | `{"object_1": {"desc": "seven", "bbox_2d": [1, 2, 3, 4]}, …}`              |
| `objects`                  | `{"objects": [{"desc": "seven", "bbox_2d": [1, 2, 3, 4]}, …]}`, also `poly` |

- `object_n` must start the answer. Text before `objects`, such as a code fence, is skipped.
- Every character is read a bounded number of times; nesting, members and items are bounded; numbers are
  never converted here. So hostile text costs linear time and bounded memory.
- Nothing is repaired: the scan stops at the first character outside the grammar.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

MAX_DEPTH = 16
MAX_MEMBERS = 64
"""Of an object inside the answer; one with more is refused."""
MAX_ITEMS = 1024
"""Of a list that are kept."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_MARK = re.compile(r'["\\]')
_BRACE_MARK = re.compile(r'["{}]')
_ATOM = re.compile(r'[^\s,\[\]{}":]+')


@dataclass(frozen=True)
class Grammar:
    """How objects are written in sequence, and which geometries they may have."""

    opened: re.Pattern[str]  # matches the text before the first object
    opening: str  # the same, as written in a target
    end: str  # closes the list of entries
    closing: str  # written after the last object
    is_numbered: bool  # entries are named object_<n>
    geometries: tuple[str, ...]


OBJECT_N = Grammar(re.compile(r"\A[ \t\n\r]*\{"), "{", "}", "}", is_numbered=True, geometries=("bbox_2d",))
OBJECTS = Grammar(
    # Prose before the answer may quote it, so the first list that begins with an object counts, else an empty one.
    re.compile(r'\{[ \t\n\r]*"objects"[ \t\n\r]*:[ \t\n\r]*\[(?=[ \t\n\r]*[{\]])'),
    '{"objects": [',
    "]",
    "]}",
    is_numbered=False,
    geometries=("bbox_2d", "poly"),
)
GRAMMARS = {"object_n": OBJECT_N, "objects": OBJECTS}

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
    """One entry; `body` is None if its braces close but the content is malformed."""

    key: Value | None  # None if entries have no names
    body: Value | None
    end: int  # characters, after the entry's value


@dataclass(frozen=True)
class Scan:
    """`closed`: the outermost brace closed within the limits; `start`: characters skipped before it."""

    members: tuple[Member, ...]
    closed: bool
    start: int = 0


def scan(text: str, max_members: int, grammar: Grammar = OBJECT_N) -> Scan:
    """Read the grammar's literal, at most `max_members` complete members."""
    found = list(grammar.opened.finditer(text))
    filled = (one for one in found if not text.startswith(grammar.end, _skip(text, one.end())))
    opened = next(filled, found[0] if found else None)
    members: list[Member] = []
    if opened is None:
        return Scan((), False)
    at, start = _skip(text, opened.end()), opened.start()
    if text.startswith(grammar.end, at):
        return Scan((), _closes(text, at, grammar), start)
    while len(members) < max_members:
        member = _member(text, at) if grammar.is_numbered else _entry(text, None, at)
        if member is None:
            break
        members.append(member)
        at = _skip(text, member.end)
        if text.startswith(grammar.end, at):
            return Scan(tuple(members), _closes(text, at, grammar), start)
        if not text.startswith(",", at):
            break
        at = _skip(text, at + 1)
    return Scan(tuple(members), False, start)


def _closes(text: str, at: int, grammar: Grammar) -> bool:
    """Whether the outermost brace closes here, where the entries end."""
    return grammar.end == "}" or text.startswith("}", _skip(text, at + 1))


def string_value(text: str, value: Value) -> str | None:
    """The string that a literal encodes; None if it isn't a JSON string, or contains a lone surrogate."""
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
    return _entry(text, key, _skip(text, at + 1))


def _entry(text: str, key: Value | None, at: int) -> Member | None:
    """The value of an entry; None if it is unfinished."""
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
    """The value that starts at `at` and ends by `stop`; None if malformed, unfinished or too deep."""
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
    while len(members) < MAX_MEMBERS:
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
