"""Predictions against truths: optimal assignment under an IoU gate.

- Candidates of a prediction are its top-k truths by IoU; by centre distance when the best IoU is 0.
- A candidate below the gate is infeasible, otherwise it costs 1 - IoU.
- Hungarian on (P+G)^2: a dummy column per prediction (`fp_cost`) and a dummy row per truth (`fn_cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from sluice.consumers.tasks.detection.geometry import Box, centre_distances, iou_matrix
from sluice.consumers.tasks.detection.grammar import GRAMMARS
from sluice.consumers.tasks.detection.parse import DetectionParse
from sluice.consumers.tasks.detection.truth import Truth, read_truths
from sluice.consumers.tasks.task import Matched, Parsed, TaskContext
from sluice.pipeline.config.types import RolloutMatchingConfig
from sluice.pipeline.errors import TaskError


@dataclass(frozen=True)
class DetectionMatch:
    """`truth_of` maps the position of a parsed object to that of its truth."""

    truths: list[Truth]
    truth_of: dict[int, int]
    unmatched: list[int]  # positions of truths, ascending


def match(parsed: Parsed, truth: Any, ctx: TaskContext) -> Matched:
    """Match the valid objects; raises TaskError if the truth isn't a list of the grammar's objects."""
    value: DetectionParse = parsed.value
    truths = read_truths(truth, parsed.result.seq_id, ctx.codec, GRAMMARS[ctx.options.grammar])
    _check_regressed(truths, parsed.result.seq_id, ctx.options)
    valid = [at for at, item in enumerate(value.objects) if item.reason is None]
    predictions = [value.objects[at].box for at in valid]
    pairs, ious, rejections = assign(predictions, [item.box for item in truths], ctx.options)
    truth_of = {valid[row]: column for row, column in pairs}
    unmatched = sorted(set(range(len(truths))) - set(truth_of.values()))
    counts = {
        "rollout/gt_objects": len(truths),
        "rollout/matched_for_supervision": len(pairs),
        "rollout/fn": len(unmatched),
        "rollout/fp": len(valid) - len(pairs),
        "rollout/gating_rejections": rejections,
        "rollout/matched_iou_sum": sum(ious),
    }
    metrics = {key: float(count) for key, count in counts.items()}
    return Matched(parsed, DetectionMatch(truths, truth_of, unmatched), metrics)


def _check_regressed(truths: list[Truth], where: str, options: RolloutMatchingConfig) -> None:
    """Raise TaskError for a truth with a position that would get no loss."""
    at = next((at for at, item in enumerate(truths) if item.geometry.kind != "bbox_2d"), None)
    if at is not None and options.matched_supervision == "geometry":
        raise TaskError(
            f"{where}: truth[{at}] is a polygon, but matched_supervision: geometry regresses only boxes; give its "
            "bbox_2d, or use truth_labels"
        )


def assign(
    predictions: list[Box], truths: list[Box], options: RolloutMatchingConfig
) -> tuple[list[tuple[int, int]], list[float], int]:
    """The optimal (prediction, truth) pairs, their IoUs, and how many candidate pairs the gate rejected."""
    if not predictions or not truths:
        return [], [], 0
    iou = iou_matrix(predictions, truths)
    candidate = candidates(iou, centre_distances(predictions, truths), options.match_top_k)
    feasible = candidate & (iou >= options.iou_gate)
    # Truths that no prediction can take stay unmatched in every optimum: leaving them out bounds the matrix.
    columns = np.flatnonzero(feasible.any(axis=0))
    cost = cost_matrix(1 - iou[:, columns], feasible[:, columns], options.fp_cost, options.fn_cost)
    rows, picks = linear_sum_assignment(cost)
    real = [(int(r), int(c)) for r, c in zip(rows, picks, strict=True) if r < len(iou) and c < len(columns)]
    pairs = [(row, int(columns[pick])) for row, pick in real]
    return pairs, [float(iou[pair]) for pair in pairs], int((candidate & ~feasible).sum())


def candidates(iou: np.ndarray, distance: np.ndarray, top_k: int) -> np.ndarray:
    """bool [P, G]: the top-k truths of each prediction; ties go to the nearer, then to the earlier truth."""
    chosen = np.zeros(iou.shape, dtype=bool)
    for row in range(len(iou)):
        order = np.lexsort((distance[row], -iou[row]))
        chosen[row, order[:top_k]] = True
    return chosen


def cost_matrix(cost: np.ndarray, feasible: np.ndarray, fp_cost: float, fn_cost: float) -> np.ndarray:
    """float64 [P+G, P+G]; an infeasible pair costs more than any assignment to dummies."""
    num_pred, num_truth = cost.shape
    size = num_pred + num_truth
    full = np.zeros((size, size))
    full[:num_pred, :num_truth] = np.where(feasible, cost, 1 + size * (1 + fp_cost + fn_cost))
    full[:num_pred, num_truth:] = fp_cost
    full[num_pred:, :num_truth] = fn_cost
    return full
