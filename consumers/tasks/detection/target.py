"""The teacher-forced target: kept prefix, appended truths, closing brace, terminator, and their supervision.

Draft (text and tokens, before supervision):

- Kept tokens are the sampled ones. A token that straddles the cut is left out, and its text up to the cut is
  re-tokenised together with the text after it, as the model would write it.
- The text after the prefix is tokenised separately if the text before it may be off (an unsupervised object, a value
  with diverging labels): a token that mixes the two would lose the supervision of the closing brace.

Supervision:

- Input ids of the prefix are the sampled ones; only labels come from the truth.
- `truth_labels` labels matched values with the truth's tokens; `geometry` switches their cross-entropy off and
  leaves the boxes to the geometry loss. Geometry targets are written whenever the tokenizer has coordinate tokens.

Truth labels on sampled tokens:

- The truth's spelling of a value is tokenised in its context and aligned with the value's sampled tokens.
- Equal counts: label position by position. Otherwise: up to and including the first token that differs; the rest
  of the value is off. If the truth is longer than the sample, that token comes right after the value.
- A token that also contains neighbouring characters gets a label that spells them too; values that share a token
  are labelled together. If no such label exists, the value is off.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.consumers.tasks.codec import begins_torn, covering
from sluice.consumers.tasks.detection.geometry import Box
from sluice.consumers.tasks.detection.grammar import GRAMMARS
from sluice.consumers.tasks.detection.match import DetectionMatch
from sluice.consumers.tasks.detection.parse import DetectionParse
from sluice.consumers.tasks.detection.truth import Piece, Truth, answer_pieces, coord_texts, desc_text, geometry_text
from sluice.consumers.tasks.rollout import Response, training_sample
from sluice.consumers.tasks.segments import MIXED_ORDER, Segment
from sluice.consumers.tasks.task import Matched, TaskContext, TextCodec
from sluice.pipeline.config.types import RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.wire.messages import GeometryTarget, TrainingSample

_RANK = {segment: rank for rank, segment in enumerate(MIXED_ORDER)}
_LEFT_TOKENS = 16
_RIGHT_CHARS = 48
"""Context that a pre-tokenizer may look at; more of it would only cost time."""


def check_options(ctx: TaskContext) -> None:
    """Raises ConfigError at start if the options need something that the tokenizer lacks."""
    if ctx.options.matched_supervision == "geometry" and not ctx.codec.coord_token_ids:
        raise ConfigError(
            "rollout_matching.matched_supervision: geometry needs a model with the tokens <|coord_0|> to"
            " <|coord_999|>, but this tokenizer has none; use truth_labels or add them"
        )


def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """The training sample of one rollout."""
    check_options(ctx)
    plan = draft(matched, ctx)
    ends = ctx.codec.char_ends(plan.token_ids)
    segments = token_segments(ends, plan.segments)
    table = segment_weights(ctx.options)
    weights = [table[segment] for segment in segments]
    labels = list(plan.token_ids)
    if ctx.options.matched_supervision == "truth_labels":
        sampled = Sampled(plan.text, plan.token_ids, ends)
        for position, label in truth_labels(ctx.codec, sampled, plan.edits).items():
            if label is None:
                weights[position] = 0.0
            else:
                labels[position] = label
    eos = ctx.codec.eos_token_ids[0]
    response = Response(
        token_ids=[*plan.token_ids, eos],
        labels=[*labels, eos],
        weights=[*weights, 1.0],
        segments=[*segments, Segment.closing],
        kept=plan.kept,
        geometry=geometry_targets(plan, ends, set(ctx.codec.coord_token_ids)),
    )
    metrics = matched.parsed.metrics | matched.metrics | {"rollout/fn_appended": float(plan.appended)}
    return training_sample(matched.parsed.result, response, metrics)


def segment_weights(options: RolloutMatchingConfig) -> dict[Segment, float]:
    """Cross-entropy weight of each segment."""
    table = {segment: 1.0 for segment in Segment}
    table[Segment.prompt] = table[Segment.false_positive] = 0.0
    table[Segment.appended_desc] = options.desc_ce_weight
    if options.matched_supervision == "geometry":
        table[Segment.matched_desc] = table[Segment.matched_coord] = table[Segment.appended_coord] = 0.0
    return table


def token_segments(ends: Sequence[int], codes: Sequence[Segment]) -> list[Segment]:
    """Per token, the strongest segment of its characters; an incomplete token has that of the character it begins."""
    segments: list[Segment] = []
    start = 0
    for end in ends:
        covered = codes[start : max(end, start + 1)] or codes[-1:]
        segments.append(max(covered, key=_RANK.__getitem__))
        start = end
    return segments


def geometry_targets(plan: Draft, ends: Sequence[int], coord_ids: set[int]) -> list[GeometryTarget]:
    """Boxes with four coordinates of one coordinate token each; positions count from the answer's start."""
    targets: list[GeometryTarget] = []
    for spans, box in plan.boxes if coord_ids else []:
        tokens = [covering(ends, *span) for span in spans]
        if all(first == last and plan.token_ids[first] in coord_ids for first, last in tokens):
            (x1, _), (y1, _), (x2, _), (y2, _) = tokens
            targets.append(GeometryTarget(positions=(x1, y1, x2, y2), box=box))
    return targets


class WrittenBox(NamedTuple):
    """The span of each of a box's four coordinates (characters [start, stop)), and the truth's box."""

    spans: tuple[tuple[int, int], ...]
    box: Box


@dataclass(frozen=True)
class Draft:
    """`segments` has one code per character of `text`."""

    text: str
    token_ids: list[int]
    kept: int
    segments: list[Segment]
    appended: int  # number of truths
    edits: list[Edit] = field(default_factory=list)
    boxes: list[WrittenBox] = field(default_factory=list)


def truth_only(seq_id: str, seed: int, fraction: float) -> bool:
    """Whether this sequence trains on the plain truth; deterministic for (seq_id, seed)."""
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
        return Draft(text, _answer_ids(text, ctx.codec), 0, _codes(pieces), len(value.truths), boxes=boxes)
    appended = [value.truths[at] for at in value.unmatched]
    pieces = answer_pieces(appended, parsed.value.next_index, coord_tokens, goes_on=True, grammar=grammar)
    boxes = _matched_boxes(parsed.value, value) + _appended_boxes(pieces, appended, parsed.value.cut)
    return _after_prefix(matched, pieces, boxes, ctx)


def _answer_ids(text: str, codec: TextCodec) -> list[int]:
    """Of a whole answer: a text of its own, unless the tokenizer then puts spaces into it, behind special tokens."""
    ids = codec.encode(text)
    return ids if codec.decode(ids) == text else codec.encode_continuation(text)


def _after_prefix(matched: Matched, pieces: list[Piece], boxes: list[WrittenBox], ctx: TaskContext) -> Draft:
    parsed: DetectionParse = matched.parsed.value
    value: DetectionMatch = matched.value
    kept, encode = matched.parsed.prefix_len, ctx.codec.encode_continuation
    rest, tail = parsed.text[parsed.kept_chars : parsed.cut], _text(pieces)
    if parsed.kept_chars >= _last_value_end(parsed, value):
        new_ids = encode(rest + tail)
    else:
        new_ids = encode(rest) + encode(tail)
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
    """The character after the last value of the last object, or the end of the text if it isn't supervised."""
    last = len(parsed.objects) - 1
    if last not in value.truth_of:
        return len(parsed.text) + 1
    item, truth = parsed.objects[last], value.truths[value.truth_of[last]]
    return max(stop for _, stop in [item.desc_span, *item.value_spans(truth.geometry)])


def _prefix_codes(parsed: DetectionParse, value: DetectionMatch) -> list[Segment]:
    """An object owns everything since the end of the previous one; skipped text is never supervised."""
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


class Edit(NamedTuple):
    """Characters [start, stop) of the sampled text, and the truth's text for them."""

    span: tuple[int, int]
    text: str


class _Group(NamedTuple):
    first: int  # tokens, inclusive
    last: int
    edits: list[Edit]


class Sampled(NamedTuple):
    """The sampled side: shapes (len(token_ids),)."""

    text: str
    token_ids: Sequence[int]
    ends: Sequence[int]


def truth_labels(codec: TextCodec, sampled: Sampled, edits: Sequence[Edit]) -> dict[int, int | None]:
    """Label per position of every edited value, None if it is off; other positions are absent."""
    labels: dict[int, int | None] = {}
    for group in _groups(sampled, edits):
        wanted, whole = _wanted(codec, sampled, group)
        for position, label in _lay(sampled.token_ids, group, wanted, whole):
            labels.setdefault(position, label)
    return labels


def _groups(sampled: Sampled, edits: Sequence[Edit]) -> list[_Group]:
    """Edits in order, grouped if they share a token."""
    groups: list[_Group] = []
    for edit in edits:
        first, last = covering(sampled.ends, *edit.span)
        if groups and first <= groups[-1].last:
            before = groups.pop()
            groups.append(_Group(before.first, max(last, before.last), [*before.edits, edit]))
        else:
            groups.append(_Group(first, last, [edit]))
    return groups


def _wanted(codec: TextCodec, sampled: Sampled, group: _Group) -> tuple[list[int], int | None]:
    """The truth's tokens from the group's first token on, and how many of them spell exactly the group."""
    if begins_torn(codec, sampled.token_ids, group.first):
        return [], None
    start = sampled.ends[group.first - 1] if group.first else 0
    stop = sampled.ends[group.last]
    middle = _replaced(sampled.text, start, stop, group.edits)
    before = sampled.token_ids[max(0, group.first - _LEFT_TOKENS) : group.first]
    left, text = codec.decode(before), middle + sampled.text[stop : stop + _RIGHT_CHARS]
    encode = codec.encode_continuation if before else codec.encode
    # Tokenised together with what precedes it; where a token would straddle that border, alone.
    for stream, begin in ((encode(left + text), 0), ([*before, *encode(text)], len(before))):
        if codec.decode(stream) != left + text:
            continue
        ends = codec.char_ends(stream)
        skip = begin or (bisect_left(ends, len(left)) + 1 if left else 0)
        if codec.decode(stream[:skip]) != left:
            continue
        border = bisect_left(ends, len(left) + len(middle))
        whole = ends[border] == len(left) + len(middle)
        return stream[skip:], border + 1 - skip if whole else None
    return [], None


def _replaced(text: str, start: int, stop: int, edits: Sequence[Edit]) -> str:
    parts: list[str] = []
    for (begin, end), new in edits:
        parts += [text[start:begin], new]
        start = end
    return "".join(parts) + text[start:stop]


def _lay(
    token_ids: Sequence[int], group: _Group, wanted: Sequence[int], whole: int | None
) -> list[tuple[int, int | None]]:
    """(position, label) of the group, including the token after it if the truth continues there."""
    positions = range(group.first, group.last + 1)
    if whole == len(positions):
        return list(zip(positions, wanted, strict=False))
    laid: list[tuple[int, int | None]] = []
    going = True
    for at in positions:
        rank = at - group.first
        going = going and rank < len(wanted)
        laid.append((at, wanted[rank] if going else None))
        going = going and wanted[rank] == token_ids[at]
    after, rank = group.last + 1, len(positions)
    if going and rank < len(wanted) and after < len(token_ids) and wanted[rank] != token_ids[after]:
        laid.append((after, wanted[rank]))
    return laid
