"""Boxes: xyxy, integers 0-999 of the image's width and height, x2 >= x1 and y2 >= y1; arrays are float64.

Polygons: at least three points with the same kind of integers; matching uses the bounding box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Box = tuple[int, int, int, int]
MAX_COORD = 999
MIN_POLY = 6  # coordinates of a polygon


@dataclass(frozen=True)
class Geometry:
    """A geometry as written; if two have the same `form`, their coordinates correspond one to one."""

    kind: Literal["bbox_2d", "poly"]
    coords: tuple[int, ...]  # x and y alternating
    in_pairs: bool = False  # a polygon of [x, y] pairs

    @property
    def form(self) -> tuple[str, int, bool]:
        """Kind, number of coordinates, and grouping."""
        return self.kind, len(self.coords), self.in_pairs

    @property
    def box(self) -> Box:
        """The box itself, or the bounding box of a polygon."""
        xs, ys = self.coords[::2], self.coords[1::2]
        return min(xs), min(ys), max(xs), max(ys)


def is_polygon(values: Sequence[object]) -> bool:
    """Three points or more, integers in range; a bool doesn't count as an integer."""
    if len(values) < MIN_POLY or len(values) % 2:
        return False
    return all(type(value) is int and 0 <= value <= MAX_COORD for value in values)


def is_box(values: Sequence[object]) -> bool:
    """Four integers in range and in order; a bool doesn't count as an integer."""
    if len(values) != 4 or not all(type(value) is int and 0 <= value <= MAX_COORD for value in values):
        return False
    x1, y1, x2, y2 = values
    return x2 >= x1 and y2 >= y1  # type: ignore[operator]


def _array(boxes: Sequence[Box]) -> np.ndarray:
    return np.asarray(boxes, dtype=np.float64).reshape(len(boxes), 4)


def iou_matrix(left: Sequence[Box], right: Sequence[Box]) -> np.ndarray:
    """IoU float64 [P, G]. Two boxes with no area have IoU 1 if they are equal, else 0."""
    a, b = _array(left)[:, None], _array(right)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    inter = np.clip(sides, 0, None).prod(axis=-1)
    union = (a[..., 2:] - a[..., :2]).prod(axis=-1) + (b[..., 2:] - b[..., :2]).prod(axis=-1) - inter
    same = (a == b).all(axis=-1).astype(np.float64)
    return np.where(union > 0, inter / np.where(union > 0, union, 1), same)


def centre_distances(left: Sequence[Box], right: Sequence[Box]) -> np.ndarray:
    """Distance between the centres, float64 [P, G], in coordinate units."""
    a, b = _array(left)[:, None], _array(right)[None]
    centres = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    return np.sqrt((centres**2).sum(axis=-1))
