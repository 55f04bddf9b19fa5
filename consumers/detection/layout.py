"""The text and tokens of a target before supervision: kept prefix, appended truths, closing brace.

- Kept tokens are the sampled ones. A token that straddles the cut is left out and its text up to the cut is
  tokenised again together with what follows, as the model itself would write it.
- What follows is tokenised apart where the text before it may be off (an unsupervised object, a value whose
  labels diverge): a token that mixes the two would take the supervision of the closing brace with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from consumers.detection.answer import Piece, answer_pieces, coord_texts, desc_text, geometry_text
from consumers.detection.geometry import Box
from consumers.detection.grammar import GRAMMARS
from consumers.detection.labels import Edit
from consumers.detection.match import DetectionMatch
from consumers.detection.parse import DetectionParse
from consumers.detection.truth import Truth
from consumers.segments import Segment
from consumers.task import Matched, TaskContext


class WrittenBox(NamedTuple):
    """Where the four coordinates of a box stand (characters [start, stop)), and the truth's box."""

    spans: tuple[tuple[int, int], ...]
    box: Box


@dataclass(frozen=True)
class Draft:
    """`segments` has one code per character of `text`."""

    text: str
    token_ids: list[int]
    kept: int
    segments: list[Segment]
    appended: int  # truths
    edits: list[Edit] = field(default_factory=list)
    boxes: list[WrittenBox] = field(default_factory=list)


def truth_only(seq_id: str, seed: int, fraction: float) -> bool:
    """Whether this sequence trains on the plain truth; the same answer for the same (seq_id, seed)."""
    digest = hashlib.sha256(f"{seed}:{seq_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def draft(matched: Matched, ctx: TaskContext) -> Draft:
    """Lay out the target of one rollout."""
    parsed, value = matched.parsed, matched.value
    plain = truth_only(parsed.result.seq_id, ctx.seed, ctx.options.gt_only_fraction)
    coord_tokens, grammar = bool(ctx.codec.coord_token_ids), GRAMMARS[ctx.options.grammar]
    if plain or not parsed.valid:
        pieces = answer_pieces(value.truths, 1, coord_tokens, goes_on=False, grammar=grammar)
        text = _text(pieces)
        boxes = _appended_boxes(pieces, value.truths, 0)
        return Draft(text, ctx.codec.encode(text), 0, _codes(pieces), len(value.truths), boxes=boxes)
    appended = [value.truths[at] for at in value.unmatched]
    pieces = answer_pieces(appended, parsed.value.next_index, coord_tokens, goes_on=True, grammar=grammar)
    boxes = _matched_boxes(parsed.value, value) + _appended_boxes(pieces, appended, parsed.value.cut)
    return _after_prefix(matched, pieces, boxes, ctx)


def _after_prefix(matched: Matched, pieces: list[Piece], boxes: list[WrittenBox], ctx: TaskContext) -> Draft:
    parsed: DetectionParse = matched.parsed.value
    value: DetectionMatch = matched.value
    kept = matched.parsed.prefix_len
    rest, tail = parsed.text[parsed.kept_chars : parsed.cut], _text(pieces)
    if parsed.kept_chars >= _last_value_end(parsed, value):
        new_ids = ctx.codec.encode(rest + tail)
    else:
        new_ids = (ctx.codec.encode(rest) if rest else []) + ctx.codec.encode(tail)
    return Draft(
        text=parsed.text[: parsed.cut] + tail,
        token_ids=[*matched.parsed.result.token_ids[:kept], *new_ids],
        kept=kept,
        segments=_prefix_codes(parsed, value) + _codes(pieces),
        appended=len(value.unmatched),
        edits=_edits(parsed, value, bool(ctx.codec.coord_token_ids)),
        boxes=boxes,
    )


def _last_value_end(parsed: DetectionParse, value: DetectionMatch) -> int:
    """The character after the last value of the last object, or the end of the text where it is not supervised."""
    last = len(parsed.objects) - 1
    if last not in value.truth_of:
        return len(parsed.text) + 1
    item, truth = parsed.objects[last], value.truths[value.truth_of[last]]
    return max(stop for _, stop in [item.desc_span, *item.value_spans(truth.geometry)])


def _prefix_codes(parsed: DetectionParse, value: DetectionMatch) -> list[Segment]:
    """An object owns everything since the end of the one before it; what the grammar skipped is never supervised."""
    codes = [Segment.false_positive] * parsed.start
    for at, item in enumerate(parsed.objects):
        matched = at in value.truth_of
        code = Segment.matched_structure if matched else Segment.false_positive
        codes += [code] * (item.end - len(codes))
        if matched:
            _paint(codes, item.desc_span, Segment.matched_desc)
            for span in item.value_spans(value.truths[value.truth_of[at]].geometry):
                _paint(codes, span, Segment.matched_coord)
    return codes


def _edits(parsed: DetectionParse, value: DetectionMatch, coord_tokens: bool) -> list[Edit]:
    edits: list[Edit] = []
    for at, truth_at in value.truth_of.items():
        item, truth = parsed.objects[at], value.truths[truth_at]
        edits.append(Edit(item.desc_span, desc_text(truth)))
        spans, texts = item.value_spans(truth.geometry), coord_texts(truth.geometry, coord_tokens)
        if len(spans) != len(texts):  # one span for all: the label leads to the truth's form, and the rest is off
            texts = [geometry_text(truth.geometry, coord_tokens)]
        edits += map(Edit, spans, texts)
    return sorted(edits, key=lambda edit: edit.span)


def _matched_boxes(parsed: DetectionParse, value: DetectionMatch) -> list[WrittenBox]:
    return [
        WrittenBox(parsed.objects[at].coord_spans, value.truths[truth_at].box)
        for at, truth_at in sorted(value.truth_of.items())
        if parsed.objects[at].geometry.kind == value.truths[truth_at].geometry.kind == "bbox_2d"
    ]


def _appended_boxes(pieces: list[Piece], truths: list[Truth], start: int) -> list[WrittenBox]:
    spans: list[tuple[int, int]] = []
    for text, code in pieces:
        if code == Segment.appended_coord:
            spans.append((start, start + len(text)))
        start += len(text)
    boxes: list[WrittenBox] = []
    for truth in truths:
        mine, spans = spans[: len(truth.geometry.coords)], spans[len(truth.geometry.coords) :]
        if truth.geometry.kind == "bbox_2d":
            boxes.append(WrittenBox(tuple(mine), truth.box))
    return boxes


def _paint(codes: list[Segment], span: tuple[int, int], code: Segment) -> None:
    codes[span[0] : span[1]] = [code] * (span[1] - span[0])


def _text(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _codes(pieces: list[Piece]) -> list[Segment]:
    return [code for text, code in pieces for _ in text]
