"""JSON Schemas of an OpenAPI document as rows that people read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
_BEYOND_NOTICE = 2**31  # bounds of the number's own type

_AT_LEAST = ("minimum", "minLength", "minItems")
_AT_MOST = ("maximum", "maxLength", "maxItems")
_UNITS = {"string": " characters"}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a type's name; `anchor` is the place of that type on the page."""

    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One row. `default` is JSON, empty where there is none."""

    name: str
    kind: list[Part]
    text: str = ""
    default: str = ""
    is_required: bool = False


def resolved(schema: Schema, document: Mapping[str, Any]) -> Schema:
    """The schema that a reference names; one that names none is given back."""
    found = document.get("components", {}).get("schemas", {}).get(_name(schema), schema)
    return found


def fields(schema: Schema, prefix: str = "") -> Iterator[Field]:
    """The properties of an object, required ones first.

    Those of objects that are written out inside it are named `outer.inner` and `list[].inner`.
    """
    required_names = schema.get("required", ())
    for name, one in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required_names):
        required = name in required_names
        default = json.dumps(one["default"], ensure_ascii=False) if "default" in one and not required else ""
        yield Field(prefix + name, kind(one), one.get("description", ""), default, required)
        for inner, suffix in ((one, "."), (one.get("items", {}), "[].")):
            yield from fields(inner, f"{prefix}{name}{suffix}")


def kind(schema: Schema) -> list[Part]:
    """A type in words, with its bounds."""
    if name := _name(schema):
        return [Part(name, f"type-{name}")]
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return _joined([kind(one) for one in schema[word]])
    if "enum" in schema or "const" in schema:
        return [Part(" | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")])))]
    types = schema.get("type", "anything")
    if isinstance(types, list):
        return _joined([kind({**schema, "type": one}) for one in types])
    if types == "array":
        return [Part("list of "), *kind(schema.get("items", {})), Part(_bounds(schema, types))]
    return [Part(types + _bounds(schema, types))]


def _name(schema: Schema) -> str:
    return schema.get("$ref", "").rpartition("/")[2]


def _joined(kinds: list[list[Part]]) -> list[Part]:
    parts: list[Part] = []
    for number, one in enumerate(kinds):
        parts += [Part(" or ")] * (number > 0) + one
    return parts


def _bounds(schema: Schema, kind: str) -> str:
    low = _bound(schema, "at least", _AT_LEAST, "above", "exclusiveMinimum")
    high = _bound(schema, "at most", _AT_MOST, "below", "exclusiveMaximum")
    if low.startswith("at") and high.startswith("at"):
        low, high = low.removeprefix("at least ") + " to " + high.removeprefix("at most "), ""
    shown = " and ".join(filter(None, (low, high)))
    return f", {shown}{_UNITS.get(kind, '')}" if shown else ""


def _bound(schema: Schema, word: str, names: Sequence[str], exclusive_word: str, exclusive: str) -> str:
    for said, name in ((exclusive_word, exclusive), *((word, name) for name in names)):
        value = schema.get(name)
        if value is not None and abs(value) < _BEYOND_NOTICE:
            return f"{said} {value:.15g}"
    return ""
