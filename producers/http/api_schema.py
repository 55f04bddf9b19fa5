"""JSON Schemas of an OpenAPI document as rows that people read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
_BEYOND_NOTICE = 2**31  # bounds of the number's own type

_AT_LEAST = ("minimum", "minLength", "minItems")
_AT_MOST = ("maximum", "maxLength", "maxItems")
_UNITS = {"string": " characters", "array": " items"}


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
    """The properties of an object, with those of the objects that are written out inside it: `outer.inner`, `list[].x`."""
    for name, one in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
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
    low = _bound(schema, _AT_LEAST, "exclusiveMinimum", "above ")
    high = _bound(schema, _AT_MOST, "exclusiveMaximum", "below ")
    if low and high:
        shown = f"{low} to {high}"
    else:
        shown = f"at least {low}" if low else f"at most {high}" if high else ""
    return f", {shown}{_UNITS.get(kind, '')}" if shown else ""


def _bound(schema: Schema, names: tuple[str, ...], exclusive: str, word: str) -> str:
    for name in (*names, exclusive):
        value = schema.get(name)
        if value is not None and abs(value) < _BEYOND_NOTICE:
            return (word if name == exclusive else "") + f"{value:.15g}"
    return ""
