"""Scenes of real handwritten digits for the demo model to read.

- A scene is a small grey canvas with one or two digits of scikit-learn's `load_digits` on it.
- Every fifth digit image is held out: held-out scenes show handwriting that appears in no train scene.
- The same (split, count, seed) always gives the same scenes, and a longer list begins with the shorter.
- A truth lists its objects left to right, then top to bottom; boxes are tight around the ink.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
from sklearn.datasets import load_digits

Split = Literal["train", "heldout"]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PAIR_PROBABILITY = 0.85
"""Share of scenes with two digits; the others have one."""

_SIDE = 8
_INK_THRESHOLD = 4.0
_SPLIT_KEYS: dict[Split, int] = {"train": 0, "heldout": 1}


@dataclass(frozen=True)
class Canvas:
    """Size in pixels; digits stand on multiples of `grid` pixels."""

    height: int
    width: int
    grid: int = 2


SMALL = Canvas(10, 18)


class SceneObject(TypedDict):
    """One true object: the digit's English name and its box, xyxy integers 0-999 of the canvas."""

    desc: str
    bbox_2d: list[int]


@dataclass(frozen=True)
class Scene:
    """`pixels`: float32 [height, width] in 0..16; `objects`: left to right, then top to bottom."""

    pixels: np.ndarray
    objects: list[SceneObject]


@functools.cache
def digit_images(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images float32 [N, 8, 8] in 0..16, labels int [N] and indices into `load_digits` int [N] of a split."""
    data: Any = load_digits()
    indices = np.arange(len(data.target))
    chosen = indices[(indices % 5 == 4) == (split == "heldout")]
    return data.images[chosen].astype(np.float32), data.target[chosen], chosen


def _box(ink: np.ndarray, top: int, left: int, canvas: Canvas) -> list[int]:
    """The xyxy box (0-999) around the inked pixels of an 8x8 digit at (top, left)."""
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    edges = (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1)
    sizes = (canvas.width, canvas.height, canvas.width, canvas.height)
    return [round(999 * int(edge) / size) for edge, size in zip(edges, sizes, strict=True)]


def _places(rng: np.random.Generator, count: int, canvas: Canvas) -> list[tuple[int, int]]:
    """`count` (top, left) corners on the grid with non-overlapping 8x8 cells."""
    while True:
        tops = canvas.grid * rng.integers(0, (canvas.height - _SIDE) // canvas.grid + 1, size=count)
        lefts = canvas.grid * rng.integers(0, (canvas.width - _SIDE) // canvas.grid + 1, size=count)
        apart = count == 1 or abs(tops[0] - tops[1]) >= _SIDE or abs(lefts[0] - lefts[1]) >= _SIDE
        if apart:
            return [(int(top), int(left)) for top, left in zip(tops, lefts, strict=True)]


def make_scene(split: Split, rng: np.random.Generator, canvas: Canvas = SMALL) -> Scene:
    """Draw one scene from the split's digit images."""
    images, labels, _ = digit_images(split)
    pixels = np.zeros((canvas.height, canvas.width), dtype=np.float32)
    objects: list[SceneObject] = []
    for top, left in _places(rng, 2 if rng.random() < PAIR_PROBABILITY else 1, canvas):
        choice = int(rng.integers(len(images)))
        pixels[top : top + _SIDE, left : left + _SIDE] = images[choice]
        box = _box(images[choice] >= _INK_THRESHOLD, top, left, canvas)
        objects.append({"desc": WORDS[int(labels[choice])], "bbox_2d": box})
    objects.sort(key=lambda item: (item["bbox_2d"][0], item["bbox_2d"][1]))
    return Scene(pixels, objects)


def scenes(split: Split, count: int, seed: int, canvas: Canvas = SMALL) -> Iterator[Scene]:
    """`count` scenes, each from its own generator keyed by (seed, split, index)."""
    for index in range(count):
        yield make_scene(split, np.random.default_rng((seed, _SPLIT_KEYS[split], index)), canvas)
