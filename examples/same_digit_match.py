"""A step of your own, by import path: a match that also wants the right label.

    sluice run -c configs/detection.yaml --set rollout_matching.match=sluice.examples.same_digit_match:match …

Steps are plain functions (consumers/tasks/task.py). This one runs the built-in Hungarian match, then takes back the
pairs whose label is wrong: a right box with the wrong name becomes a false positive and a missed truth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.consumers.tasks.detection.geometry import iou_matrix
from sluice.consumers.tasks.detection.match import match as by_boxes
from sluice.consumers.tasks.task import Matched, Parsed, TaskContext


def match(parsed: Parsed, truth: Any, ctx: TaskContext) -> Matched:
    """Pairs of the same label only."""
    found = by_boxes(parsed, truth, ctx)
    objects, truths = parsed.value.objects, found.value.truths
    kept = {at: to for at, to in found.value.truth_of.items() if objects[at].desc == truths[to].desc}
    missed = sorted(set(range(len(truths))) - set(kept.values()))
    metrics = {
        **found.metrics,
        "rollout/matched_for_supervision": float(len(kept)),
        "rollout/fn": float(len(missed)),
        "rollout/fp": found.metrics["rollout/fp"] + len(found.value.truth_of) - len(kept),
        "rollout/matched_iou_sum": sum(
            float(iou_matrix([objects[at].box], [truths[to].box])[0, 0]) for at, to in kept.items()
        ),
    }
    return replace(found, value=replace(found.value, truth_of=kept, unmatched=missed), metrics=metrics)
