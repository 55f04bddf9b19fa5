"""Lone surrogates: halves of a character that are no Unicode text, so no tokenizer and no wire takes them.

They come from JSON escapes (`"\\ud800"`), from YAML, and from arguments that are not UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec


def lone_surrogate(value: Any, where: str) -> str | None:
    """Says where a string of the value, or a key, has a lone surrogate; None if none has.

    Looks into mappings, lists, tuples and structs; `where` is the name of the whole, and may be empty.
    """
    if _encodes(value):
        return None
    rest: list[tuple[str, Any]] = [(where, value)]
    while rest:
        place, one = rest.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(one, str):
            if (found := _first(one)) is not None:
                return (
                    f"{place} has a lone surrogate ({one[found]!r}) at character {found}, which is no Unicode text; "
                    "remove it"
                )
        elif isinstance(one, Mapping):
            for key, item in cast("Mapping[Any, Any]", one).items():
                inner += [(f"a key of {place or 'the whole'}", key), (f"{place}.{key}" if place else str(key), item)]
        elif isinstance(one, (list, tuple)):
            inner = [(f"{place}[{at}]", item) for at, item in enumerate(cast("list[Any]", one))]
        elif isinstance(one, msgspec.Struct):
            inner = [(f"{place}.{name}", getattr(one, name)) for name in one.__struct_fields__]
        rest += reversed(inner)
    return None


def lone_surrogate_in_json(raw: bytes, where: str) -> str | None:
    """The same for JSON that msgspec refused; its own error does not name an escaped surrogate."""
    if b"\\u" not in raw:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return lone_surrogate(value, where)


def _encodes(value: Any) -> bool:
    """True only without a surrogate; far faster than looking."""
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):  # of a surrogate, or of what is no plain value
        return False
    return True


def _first(text: str) -> int | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
