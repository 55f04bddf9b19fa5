"""What the model wrote: objects in order of appearance, each valid or dropped for one counted reason.

- The answer ends at the first turn terminator. What may stand before the literal is the grammar's rule.
- Of a rollout of several turns only the last one is read; those before it are its prompt.
- The kept prefix ends with the last complete object, valid or not; with nothing valid, nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from consumers.detection.grammar import GRAMMARS, Grammar, Scan, scan
from consumers.detection.objects import ParsedObject, read_object
from consumers.rollout import final_turn, rollout_metrics
from consumers.spans import answer_ids, clean_cut
from consumers.task import Parsed, TaskContext
from pipeline.telemetry.training_metrics import DROP_REASONS
from pipeline.wire.messages import SequenceResult


@dataclass(frozen=True)
class DetectionParse:
    """`text` is the answer up to its terminator; `cut` the character after the last complete object.

    The literal begins at character `start`; what is before it was skipped.
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
    """Read the rollout; never raises on what a model wrote."""
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
    metrics = rollout_metrics(whole, ctx.options) | _metrics(value)
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
