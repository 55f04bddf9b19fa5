"""Types, defaults and table rows in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

_PLAIN: dict[Any, str] = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "anything",
    NoneType: "null",
}


def type_words(annotation: Any) -> str:
    """An annotation as a reader of YAML or of the wire would say it."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_words(each) for each in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"[{', '.join(type_words(each) for each in inner)}]"
    if origin in (tuple, list):
        return f"list of {type_words(inner[0])}"
    if origin is dict:
        return "mapping" if inner[1] is Any else f"mapping of {type_words(inner[0])} to {type_words(inner[1])}"
    return f"`{getattr(annotation, '__name__', annotation)}`"


def default_words(field: msgspec.structs.FieldInfo) -> str:
    """The default as YAML would write it; `required` where there is none."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    try:
        return f"`{json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}`"
    except (TypeError, ValueError):  # arrays and spans
        return "empty"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may hold `|` and `<`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    plain = text.replace("|", "\\|")
    return plain if "`" in plain else plain.replace("<", "&lt;")


def sentence(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split())
