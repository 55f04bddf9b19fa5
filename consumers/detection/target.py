"""The teacher-forced target: kept prefix, appended truths, closing brace, terminator, and their supervision.

- Input ids of the prefix are the sampled ones; only labels come from the truth.
- Weights follow the table of the contract: `truth_labels` labels matched values with the truth's tokens,
  `geometry` switches their cross-entropy off and leaves the boxes to the geometry loss.
- Geometry targets are written whenever the tokenizer has coordinate tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from consumers.detection.labels import Sampled, truth_labels
from consumers.detection.layout import Draft, draft
from consumers.rollout import Response, training_sample
from consumers.segments import MIXED_ORDER, Segment
from consumers.spans import covering
from consumers.task import Matched, TaskContext
from pipeline.config.types import RolloutMatchingConfig
from pipeline.errors import ConfigError
from pipeline.wire.messages import GeometryTarget, TrainingSample

_RANK = {segment: rank for rank, segment in enumerate(MIXED_ORDER)}


def check_options(ctx: TaskContext) -> None:
    """Raises ConfigError at start when the options need what the tokenizer lacks."""
    if ctx.options.matched_supervision == "geometry" and not ctx.codec.coord_token_ids:
        raise ConfigError(
            "rollout_matching.matched_supervision: geometry needs a model with the tokens <|coord_0|> to"
            " <|coord_999|>, this tokenizer has none; use truth_labels or add them"
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
    """Per token the strongest segment of its characters; an incomplete token has that of what it begins."""
    segments: list[Segment] = []
    start = 0
    for end in ends:
        covered = codes[start : max(end, start + 1)] or codes[-1:]
        segments.append(max(covered, key=_RANK.__getitem__))
        start = end
    return segments


def geometry_targets(plan: Draft, ends: Sequence[int], coord_ids: set[int]) -> list[GeometryTarget]:
    """Boxes whose four coordinates are one coordinate token each; positions count from the answer's start."""
    targets: list[GeometryTarget] = []
    for spans, box in plan.boxes if coord_ids else []:
        tokens = [covering(ends, *span) for span in spans]
        if all(first == last and plan.token_ids[first] in coord_ids for first, last in tokens):
            (x1, _), (y1, _), (x2, _), (y2, _) = tokens
            targets.append(GeometryTarget(positions=(x1, y1, x2, y2), box=box))
    return targets
