"""One entry of the answer: read strictly, dropped with one reason.

The rules are checked in this order, and the first broken one is the reason:

- `key_invalid`: name not object_<n> or used before, value no well-formed object, a key twice or unknown;
- `unknown_geom`: a geometry key besides bbox_2d;
- `missing_desc`, `missing_geom`, `wrong_arity`;
- `non_coord_token`: not an integer or, with coordinate tokens, not one of them;
- `bbox_invalid`: out of range or order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from consumers.detection.geometry import Box, is_box
from consumers.detection.grammar import Member, Value, string_value

Span = tuple[int, int]

_NAME = re.compile(r"object_(0|[1-9][0-9]{0,8})")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_COORD = re.compile(r"<\|coord_(0|[1-9][0-9]*)\|>")
_GEOMETRY = re.compile(r"bbox|box|poly|point|line|quad|mask|circle|ellipse|keypoint|segment")
_LONGEST_NUMBER = 4  # "-999"; longer ones are out of range and never converted


@dataclass(frozen=True)
class ParsedObject:
    """Spans are [start, end) in characters of the answer; the last four are set for valid objects only."""

    end: int
    index: int | None
    reason: str | None
    desc: str = ""
    box: Box = (0, 0, 0, 0)
    desc_span: Span = (0, 0)  # between the quotes
    coord_spans: tuple[Span, ...] = ()  # 4, in the order x1 y1 x2 y2


def read_object(text: str, member: Member, taken: set[str], coord_tokens: bool) -> ParsedObject:
    """Read one entry; `taken` holds the names used so far and is extended."""
    name = string_value(text, member.key)
    known = _NAME.fullmatch(name) if name is not None else None
    index = int(known.group(1)) if known else None
    body = member.body
    if known is None or name is None or name in taken or body is None or body.kind != "object":
        reason: str | None = "key_invalid"
    else:
        reason = None
    if name is not None:
        taken.add(name)
    if reason or body is None:
        return ParsedObject(member.end, index, reason)
    return _read_body(text, body, index, coord_tokens)


def _read_body(text: str, body: Value, index: int | None, coord_tokens: bool) -> ParsedObject:
    keys = [string_value(text, key) for key, _ in body.members]
    fields = {key: value for key, (_, value) in zip(keys, body.members, strict=True) if key is not None}
    reason = _key_reason(keys, fields)
    desc = fields.get("desc")
    words = string_value(text, desc) if desc is not None and desc.kind == "string" else None
    if reason is None and (desc is None or words is None or not words.strip()):
        reason = "missing_desc"
    numbers: list[int] = []
    geometry = fields.get("bbox_2d")
    if reason is None:
        reason = _box_reason(text, geometry, coord_tokens, numbers)
    if reason is not None or desc is None or words is None or geometry is None:
        return ParsedObject(body.end, index, reason)
    x1, y1, x2, y2 = numbers
    spans = tuple((item.start, item.end) for item in geometry.items)
    return ParsedObject(body.end, index, None, words, (x1, y1, x2, y2), (desc.start + 1, desc.end - 1), spans)


def _key_reason(keys: list[str | None], fields: dict[str, Value]) -> str | None:
    if None in keys or len(fields) < len(keys):
        return "key_invalid"
    extra = set(fields) - {"desc", "bbox_2d"}
    if not extra:
        return None
    geometric = all(_GEOMETRY.search(key.lower()) or fields[key].kind == "list" for key in extra)
    return "unknown_geom" if geometric else "key_invalid"


def _box_reason(text: str, geometry: Value | None, coord_tokens: bool, numbers: list[int]) -> str | None:
    """Why the box is refused; on success its four integers are in `numbers`."""
    if geometry is None:
        return "missing_geom"
    if geometry.kind != "list" or len(geometry.items) != 4:
        return "wrong_arity"
    for item in geometry.items:
        found = (_COORD if coord_tokens else _INTEGER).fullmatch(text, item.start, item.end)
        if item.kind != "atom" or found is None:
            return "non_coord_token"
        digits = found.group(1) if coord_tokens else found.group()
        numbers.append(int(digits) if len(digits) <= _LONGEST_NUMBER else -1)
    return None if is_box(numbers) else "bbox_invalid"
