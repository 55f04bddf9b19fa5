"""`GET /docs`: the application's OpenAPI document as one HTML page that needs nothing else.

- No script, no font, no picture, nothing from another host: clusters are cut off.
- All text is escaped, and the page's own policy forbids the browser to load or run anything.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

PATH = "/docs"
_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_METHODS = ("get", "put", "post", "delete", "patch")
_JSON = "application/json"
_WIDTH = 84  # of a line of an example

Document = Mapping[str, Any]


def add_api_page(app: FastAPI, *, needs_key: bool) -> None:
    """The application is to be made with `docs_url=None, redoc_url=None`."""

    @app.get(PATH, include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        url = str(request.base_url).rstrip("/")
        return HTMLResponse(api_page(app.openapi(), url, needs_key=needs_key), headers=_POLICY)


def api_page(document: Document, url: str, *, needs_key: bool = False) -> str:
    """The whole page; `url` is where the examples send their requests."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = {tag["name"]: tag.get("description", "") for tag in document.get("tags", ())}
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for route in _routes(document, url, needs_key):
        groups.setdefault(route["tag"], []).append(route)
    return templates.get_template("api_page.html.j2").render(
        info=document["info"],
        needs_key=needs_key,
        groups=[(name, known.get(name, ""), routes) for name, routes in groups.items() if routes],
        types=[(name, one, list(fields(one))) for name, one in _types(document)],
        kind=kind,
    )


def _routes(document: Document, url: str, needs_key: bool) -> Iterator[dict[str, Any]]:
    shown: list[Mapping[str, Any]] = []
    for path, item in document["paths"].items():
        for method in (one for one in _METHODS if one in item):
            operation = item[method]
            body = operation.get("requestBody", {}).get("content", {}).get(_JSON, {})
            schema = resolved(body.get("schema", {}), document)
            line = _curl(method, url + _filled(path, operation), needs_key and path != "/health")
            examples = list(_examples(body, schema)) or [("", None)]
            yield {
                "method": method.upper(),
                "path": path,
                "anchor": re.sub(r"\W+", "-", f"{method}{path}").strip("-"),
                "tag": (operation.get("tags") or ["other"])[0],
                "summary": operation.get("summary", ""),
                "text": operation.get("description", ""),
                "parameters": [_parameter(one) for one in operation.get("parameters", ())],
                "body": [] if schema in shown else list(fields(schema)),
                "body_kind": kind(body["schema"]) if schema else [],
                "examples": [(name, _shown(value), line + _data(value)) for name, value in examples],
                "answers": [_answer(*one) for one in operation["responses"].items() if one[0] < "400"],
                "errors": [_answer(*one) for one in sorted(operation["responses"].items()) if one[0] >= "400"],
            }
            shown.append(schema)  # once a page is enough


def _parameter(one: Mapping[str, Any]) -> tuple[str, Field]:
    text = one.get("description", "")
    return one["in"], Field(one["name"], kind(one.get("schema", {})), text, is_required=one.get("required", False))


def _answer(status: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    bodies = [
        {"media": media, "kind": kind(one["schema"]) if one.get("schema") else [], "example": _example(one)}
        for media, one in answer.get("content", {}).items()
    ]
    return {"status": status, "text": answer.get("description", ""), "bodies": bodies}


def _example(body: Mapping[str, Any]) -> str:
    found = next((value for _, value in _examples(body, {})), None)
    return found if isinstance(found, str) else _shown(found)


def _examples(body: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "example" in body:
        yield "", body["example"]
    for one in body.get("examples", {}).values():
        yield one.get("summary", ""), one["value"]
    if not body.keys() & {"example", "examples"}:
        yield from (("", value) for value in schema.get("examples", ()))


def _filled(path: str, operation: Mapping[str, Any]) -> str:
    for one in operation.get("parameters", ()):
        examples = one.get("schema", {}).get("examples") or [one["name"].upper()]
        path = path.replace(f"{{{one['name']}}}", str(examples[0]))
    return path


def _curl(method: str, url: str, with_key: bool) -> str:
    verb = {"get": "", "post": ""}.get(method, f"-X {method.upper()} ")
    return f"curl {verb}{shlex.quote(url)}" + (' -H "Authorization: Bearer $KEY"' if with_key else "")


def _shown(value: Any) -> str:
    return "" if value is None else _pretty(value)


def _data(value: Any) -> str:
    if value is None:
        return ""
    return f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(value, ensure_ascii=False))}"


def _pretty(value: Any, before: str = "") -> str:
    """JSON in which what is short stays in one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(before) + len(flat) <= _WIDTH or not isinstance(value, dict | list):
        return flat
    more = before + "  "
    if isinstance(value, list):
        inner = [_pretty(one, more) for one in value]
    else:
        inner = [f"{json.dumps(name)}: {_pretty(one, more)}" for name, one in value.items()]
    opened, closed = "[]" if isinstance(value, list) else "{}"
    return f"{opened}\n{more}" + f",\n{more}".join(inner) + f"\n{before}{closed}"


def _types(document: Document) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(document.get("components", {}).get("schemas", {}).items())


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
