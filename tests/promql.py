"""Which series and labels a PromQL expression reads: a tokenizer and one walk over it; no evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<range>\[[^\]]*\])
    |(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?)
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<op>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_RANGE = re.compile(r"\[(\$__rate_interval|\d+(ms|[smhdwy]))(:.*)?\]")


@dataclass
class Selector:
    """A series with its matchers: (label, operator, value)."""

    name: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Query:
    """What an expression uses."""

    selectors: list[Selector] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    grouped_by: set[str] = field(default_factory=set)


def read(expression: str) -> Query:
    """Raises ValueError for what is not PromQL's form."""
    tokens, query, at, depth = _tokens(expression), Query(), 0, 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        depth += (text == "(") - (text == ")")
        if depth < 0 or (text in "{}" and kind == "op"):
            raise ValueError(f"{expression!r}: {text!r} is out of place")
        if kind == "range" and not _RANGE.fullmatch(text):
            raise ValueError(f"{expression!r}: not a range: {text}")
        at += 1
        if kind != "name":
            continue
        if text in _GROUPING:
            at, names = _list(tokens, at, "(", ")")
            query.grouped_by.update(name for _, name in names if name != ",")
        elif following == "(" or following in _GROUPING:
            query.functions.add(text)
        elif text not in _WORDS:
            selector = Selector(text)
            if following == "{":
                at, found = _list(tokens, at, "{", "}")
                selector.matchers = _matchers(found)
            query.selectors.append(selector)
    if depth or not query.selectors:
        raise ValueError(f"{expression!r}: brackets do not match, or it reads nothing")
    return query


def _tokens(expression: str) -> list[tuple[str, str]]:
    found, at = list[tuple[str, str]](), 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"{expression!r}: cannot read {expression[at:]!r}")
        at = match.end()
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
    return found


def _list(tokens: list[tuple[str, str]], at: int, opening: str, closing: str) -> tuple[int, list[tuple[str, str]]]:
    if tokens[at][1] != opening:
        raise ValueError(f"{opening} expected at {tokens[at]}")
    end = next((i for i in range(at, len(tokens)) if tokens[i] == ("op", closing)), None)
    if end is None:
        raise ValueError(f"{closing} is missing")
    return end + 1, tokens[at + 1 : end]


def _matchers(tokens: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    parts = [token for token in tokens if token[1] != ","]
    if len(parts) % 3:
        raise ValueError(f"not matchers: {tokens}")
    return [(parts[i][1], parts[i + 1][1], parts[i + 2][1][1:-1]) for i in range(0, len(parts), 3)]
