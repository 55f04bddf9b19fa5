"""The objects in the model's answer, in order, each valid or dropped for one counted reason.

- The answer ends at the first turn terminator. The grammar decides what may precede the literal.
- Of a multi-turn rollout only the last turn is read; the earlier ones are its prompt.
- The kept prefix ends with the last complete object, valid or not; if none is valid, nothing is kept.

The rules for an object are checked in this order, and the first one it breaks is the reason:

- `key_invalid`: name (where entries have names) not object_<n> or already used, value not a well-formed object, a
  duplicate or unknown key;
- `unknown_geom`: a geometry key that the grammar doesn't have, or a second one;
- `missing_desc`, `missing_geom`, `wrong_arity` (for a polygon too: under three points, an odd number of coordinates);
- `non_coord_token`: not an integer or, with coordinate tokens, not one of them;
- `bbox_invalid`: out of range or order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sluice.consumers.tasks.codec import clean_cut
from sluice.consumers.tasks.detection.geometry import MIN_POLY, Box, Geometry, is_box, is_polygon
from sluice.consumers.tasks.detection.grammar import (
    GRAMMARS,
    MAX_ITEMS,
    OBJECT_N,
    Grammar,
    Member,
    Scan,
    Value,
    scan,
    string_value,
)
from sluice.consumers.tasks.rollout import answer_ids, final_turn, rollout_metrics
from sluice.consumers.tasks.task import Parsed, TaskContext
from sluice.pipeline.telemetry.training_metrics import DROP_REASONS
from sluice.pipeline.wire.messages import SequenceResult

Span = tuple[int, int]
_NONE = Geometry("bbox_2d", (0, 0, 0, 0))
_NAME = re.compile(r"object_(0|[1-9][0-9]{0,8})")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_COORD = re.compile(r"<\|coord_(0|[1-9][0-9]*)\|>")
_GEOMETRY = re.compile(r"bbox|box|poly|point|line|quad|mask|circle|ellipse|keypoint|segment")
_LONGEST_NUMBER = 4  # "-999"; longer ones are out of range and never converted


@dataclass(frozen=True)
class DetectionParse:
    """`text` is the answer up to its terminator; `cut` the character after the last complete object.

    The literal begins at character `start`; the text before it was skipped.
    """

    text: str
    objects: tuple[ParsedObject, ...]
    truncated: bool
    cut: int
    kept_chars: int  # characters of the `prefix_len` kept tokens; < cut when a token straddles the cut
    start: int = 0

    @property
    def valid(self) -> list[ParsedObject]:
        """Objects without a drop reason."""
        return [item for item in self.objects if item.reason is None]

    @property
    def next_index(self) -> int:
        """The number of the next object: one more than the highest so far."""
        return 1 + max((item.index or 0 for item in self.objects), default=0)


def parse(result: SequenceResult, ctx: TaskContext) -> Parsed:
    """Read the rollout; never raises on model output."""
    whole, result = result, final_turn(result)
    ids = answer_ids(result, ctx.codec)
    text = ctx.codec.decode(ids)
    grammar = GRAMMARS[ctx.options.grammar]
    found = scan(text[: ctx.options.max_text_chars], ctx.options.max_objects, grammar)
    objects = _objects(text, found, bool(ctx.codec.coord_token_ids), grammar)
    valid = any(item.reason is None for item in objects)
    cut = objects[-1].end if valid else 0
    prefix_len, kept_chars = clean_cut(ctx.codec, ids, text, cut)
    value = DetectionParse(text, objects, not found.closed, cut, kept_chars, found.start)
    metrics = rollout_metrics(whole) | _metrics(value)
    return Parsed(result, value, prefix_len, valid, metrics)


def _objects(text: str, found: Scan, coord_tokens: bool, grammar: Grammar) -> tuple[ParsedObject, ...]:
    objects: list[ParsedObject] = []
    taken: set[str] = set()
    for member in found.members:
        objects.append(read_object(text, member, taken, coord_tokens, grammar))
    return tuple(objects)


def _metrics(value: DetectionParse) -> dict[str, float]:
    dropped = [item.reason for item in value.objects if item.reason is not None]
    kept = len(value.objects) - len(dropped)
    counts = {
        "rollout/parse_dropped_invalid": len(dropped),
        "rollout/parse_truncated": int(value.truncated),
        "rollout/parse_obj_total": len(value.objects),
        "rollout/valid_pred_objects": kept,
        "rollout/valid_samples": int(kept > 0),
        "stage2/invalid_rollout": int(kept == 0),
    }
    reasons = {f"strict_drop/reason/{reason}": dropped.count(reason) for reason in DROP_REASONS}
    return {key: float(count) for key, count in (counts | reasons).items()}


@dataclass(frozen=True)
class ParsedObject:
    """Spans are [start, end) in characters of the answer; fields after `reason` are set for valid objects only."""

    end: int
    index: int | None
    reason: str | None
    desc: str = ""
    box: Box = (0, 0, 0, 0)
    desc_span: Span = (0, 0)  # between the quotes
    coord_spans: tuple[Span, ...] = ()  # in the order of the geometry's coordinates
    geometry: Geometry = _NONE
    geometry_span: Span = (0, 0)  # covers key and value

    def value_spans(self, truth: Geometry) -> list[Span]:
        """The spans that a truth's geometry is aligned with: its coordinates, or the whole geometry if the forms
        differ.
        """
        return list(self.coord_spans) if self.geometry.form == truth.form else [self.geometry_span]


def read_object(
    text: str, member: Member, taken: set[str], coord_tokens: bool, grammar: Grammar = OBJECT_N
) -> ParsedObject:
    """Read one entry; `taken` holds the names used so far and is extended."""
    if member.key is None:
        if member.body is None or member.body.kind != "object":
            return ParsedObject(member.end, None, "key_invalid")
        return _read_body(text, member.body, None, coord_tokens, grammar)
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
    return _read_body(text, body, index, coord_tokens, grammar)


def _read_body(text: str, body: Value, index: int | None, coord_tokens: bool, grammar: Grammar) -> ParsedObject:
    keys = [string_value(text, key) for key, _ in body.members]
    fields = {key: value for key, (_, value) in zip(keys, body.members, strict=True) if key is not None}
    kind = next((name for name in grammar.geometries if name in fields), "bbox_2d")
    reason = _key_reason(keys, fields, kind)
    desc = fields.get("desc")
    words = string_value(text, desc) if desc is not None and desc.kind == "string" else None
    if reason is None and (desc is None or words is None or not words.strip()):
        reason = "missing_desc"
    numbers: list[int] = []
    value = fields.get(kind)
    items = _coords(value) if kind == "poly" else value.items if value is not None and value.kind == "list" else ()
    if reason is None:
        reason = _geometry_reason(text, kind, value, items, coord_tokens, numbers)
    if reason is not None or desc is None or words is None or value is None:
        return ParsedObject(body.end, index, reason)
    in_pairs = kind == "poly" and value.items[0].kind == "list"
    geometry = Geometry("poly" if kind == "poly" else "bbox_2d", tuple(numbers), in_pairs)
    return ParsedObject(
        end=body.end,
        index=index,
        reason=None,
        desc=words,
        box=geometry.box,
        desc_span=(desc.start + 1, desc.end - 1),
        coord_spans=tuple((item.start, item.end) for item in items),
        geometry=geometry,
        geometry_span=(body.members[keys.index(kind)][0].start, value.end),
    )


def _key_reason(keys: list[str | None], fields: dict[str, Value], kind: str) -> str | None:
    if None in keys or len(fields) < len(keys):
        return "key_invalid"
    extra = set(fields) - {"desc", kind}
    if not extra:
        return None
    geometric = all(_GEOMETRY.search(key.lower()) or fields[key].kind == "list" for key in extra)
    return "unknown_geom" if geometric else "key_invalid"


def _coords(value: Value | None) -> tuple[Value, ...]:
    """The coordinates of a polygon, flat or in pairs; empty for anything else."""
    if value is None or value.kind != "list" or len(value.items) >= MAX_ITEMS:  # a longer list was cut
        return ()
    if all(item.kind == "list" and len(item.items) == 2 for item in value.items):
        return tuple(inner for item in value.items for inner in item.items)
    return value.items


def _geometry_reason(
    text: str, kind: str, value: Value | None, items: tuple[Value, ...], coord_tokens: bool, numbers: list[int]
) -> str | None:
    """Why the geometry is rejected; on success its integers are in `numbers`."""
    if value is None:
        return "missing_geom"
    if kind == "poly" and (len(items) < MIN_POLY or len(items) % 2):
        return "wrong_arity"
    if kind == "bbox_2d" and len(items) != 4:
        return "wrong_arity"
    for item in items:
        found = (_COORD if coord_tokens else _INTEGER).fullmatch(text, item.start, item.end)
        if item.kind != "atom" or found is None:
            return "non_coord_token"
        digits = found.group(1) if coord_tokens else found.group()
        numbers.append(int(digits) if len(digits) <= _LONGEST_NUMBER else -1)
    return None if (is_polygon if kind == "poly" else is_box)(numbers) else "bbox_invalid"
