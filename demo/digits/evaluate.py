"""Detection F1 of answers on held-out scenes: the right digit, and a box with IoU of at least 0.5.

- A prediction pairs with at most one truth; the number of pairs is maximal.
- A text that isn't a complete answer literal scores its complete leading objects only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from scipy.optimize import linear_sum_assignment

IOU_THRESHOLD = 0.5

_BODY = r'\{"desc": "[a-z]{1,32}", "bbox_2d": \[[0-9]{1,3}(?:, [0-9]{1,3}){3}\]\}'
_OBJECT = re.compile(rf'"object_[0-9]{{1,6}}": ({_BODY})(?:, |\}}|$)')


class DetectionScore(TypedDict):
    """Each in 0..1; 0 if nothing was predicted or nothing was true."""

    f1: float
    precision: float
    recall: float


def read_objects(text: str) -> list[dict[str, Any]]:
    """The complete leading objects of an answer; everything after the first error is ignored."""
    objects: list[dict[str, Any]] = []
    position = 1 if text.startswith("{") else len(text)
    while found := _OBJECT.match(text, position):
        objects.append(json.loads(found.group(1)))
        position = found.end()
    return objects


def iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two xyxy boxes, in 0..1; inverted and empty boxes have IoU 0."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return width * height / (sum(areas) - width * height)


def num_hits(predicted: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]) -> int:
    """The largest number of one-to-one pairs with the same digit and IoU ≥ 0.5."""
    if not predicted or not truth:
        return 0
    hits = np.array(
        [
            [a["desc"] == b["desc"] and iou(a["bbox_2d"], b["bbox_2d"]) >= IOU_THRESHOLD for b in truth]
            for a in predicted
        ]
    )
    rows, columns = linear_sum_assignment(hits, maximize=True)
    return int(hits[rows, columns].sum())


def detection_f1(predicted_texts: Sequence[str], truths: Sequence[Sequence[Mapping[str, Any]]]) -> DetectionScore:
    """Micro-averaged score over all scenes; raises ValueError if the two lists differ in length."""
    num_predicted = num_true = hits = 0
    for text, truth in zip(predicted_texts, truths, strict=True):
        predicted = read_objects(text)
        num_predicted, num_true = num_predicted + len(predicted), num_true + len(truth)
        hits += num_hits(predicted, truth)
    precision = hits / num_predicted if num_predicted else 0.0
    recall = hits / num_true if num_true else 0.0
    total = precision + recall
    f1 = 0.0 if math.isclose(total, 0.0) else 2 * precision * recall / total
    return {"f1": f1, "precision": precision, "recall": recall}
