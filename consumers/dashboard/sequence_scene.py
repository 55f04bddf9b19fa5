"""Boxes of a detection answer as shapes of an SVG. Pure.

- Boxes are xyxy 0-999 of the picture's width and height; the drawing is WIDTH wide and keeps the picture's shape.
- A truth is dashed, a prediction solid; its fate is said by its label as well as by its colour.
- Labels stay inside the drawing: a prediction's is above its box or, for want of room, within; a truth's below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from consumers.dashboard.sequence_outcome import Thing
from consumers.dashboard.sequence_text import visible
from consumers.detection.geometry import MAX_COORD, Box

WIDTH = 720.0
_MIN_SIDE = 120.0
_MAX_SIDE = 1440.0
_LINE = 18.0  # height of a label
_CHAR = 10.3  # its width, roughly
_MAX_SHAPES = 400
_MOST_LINES = 5  # that a label gives way
_CLASS = {"matched": "matched", "false positive": "false-positive", "missed": "missed"}
_SIGN = {"matched": "\u2713", "false positive": "\u2717", "missed": "?"}


@dataclass(frozen=True)
class Shape:
    """A rectangle and its label, in drawing units."""

    css: str
    x: float
    y: float
    width: float
    height: float
    label: str
    label_x: float
    label_y: float
    title: str


@dataclass(frozen=True)
class Scene:
    """What to draw; `hidden` shapes were left out for their number."""

    width: float
    height: float
    shapes: list[Shape]
    hidden: int = 0


def scene(things: Iterable[Thing], size: tuple[int, int] | None = None) -> Scene:
    """`size`: width and height of the picture in pixels; None draws a square field."""
    height = WIDTH if size is None else min(_MAX_SIDE, max(_MIN_SIDE, WIDTH * size[1] / max(1, size[0])))
    shapes = [shape for thing in things for shape in _shapes(thing, height)]
    return Scene(WIDTH, round(height, 1), _apart(shapes[:_MAX_SHAPES], height), max(0, len(shapes) - _MAX_SHAPES))


def _apart(shapes: list[Shape], height: float) -> list[Shape]:
    """Labels that would lie on one another go down a line, a few times at most."""
    placed: list[Shape] = []
    for shape in shapes:
        for _ in range(_MOST_LINES):
            lower = shape.label_y + _LINE
            if not any(_overlap(shape, other) for other in placed) or lower > height:
                break
            shape = replace(shape, label_y=round(lower, 1))
        placed.append(shape)
    return placed


def _overlap(one: Shape, other: Shape) -> bool:
    left, right = (one, other) if one.label_x <= other.label_x else (other, one)
    is_beside = left.label_x + _CHAR * len(left.label) < right.label_x
    return bool(one.label and other.label) and abs(one.label_y - other.label_y) < _LINE - 1 and not is_beside


def _shapes(thing: Thing, height: float) -> list[Shape]:
    """Of a matched pair the truth first, so that the prediction lies over it."""
    shapes: list[Shape] = []
    css = _CLASS.get(thing.fate, "")
    if thing.truth_box is not None:
        label = f"{_SIGN['missed']} {thing.truth}" if thing.fate == "missed" else ""
        title = f"truth{' (missed)' if thing.fate == 'missed' else ''}: {thing.truth} {list(thing.truth_box)}"
        shapes.append(_shape(f"truth {css}", thing.truth_box, height, label, title, below=True))
    if thing.box is not None:
        label = f"{thing.number} {_SIGN[thing.fate]} {thing.predicted}"
        iou = "" if thing.iou is None else f", IoU {thing.iou:.2f}"
        title = f"{thing.fate}: {thing.predicted} {list(thing.box)}{iou}"
        shapes.append(_shape(f"prediction {css}", thing.box, height, label, title, below=False))
    return shapes


def _shape(css: str, box: Box, height: float, label: str, title: str, *, below: bool) -> Shape:
    x1, y1, x2, y2 = box
    left, right = x1 * WIDTH / MAX_COORD, x2 * WIDTH / MAX_COORD
    top, bottom = y1 * height / MAX_COORD, y2 * height / MAX_COORD
    label = visible(label, 40)
    at = bottom + _LINE if below else top - 6 if top > _LINE + 6 else top + _LINE
    return Shape(
        css=css,
        x=round(left, 1),
        y=round(top, 1),
        width=round(max(right - left, 1), 1),
        height=round(max(bottom - top, 1), 1),
        label=label,
        label_x=round(max(2.0, min(left + 2, WIDTH - _CHAR * len(label))), 1),
        label_y=round(max(_LINE, min(at, height - 5)), 1),
        title=visible(title, 200),
    )
