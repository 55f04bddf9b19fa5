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
HEIGHT, WIDTH = 10, 18
"""Canvas size in pixels."""
GRID = 2
"""Digits stand on multiples of this many pixels."""
PAIR_PROBABILITY = 0.85
"""Share of scenes with two digits; the others have one."""

_SIDE = 8
_INK_THRESHOLD = 4.0
_SPLIT_KEYS: dict[Split, int] = {"train": 0, "heldout": 1}


class SceneObject(TypedDict):
    """One true object: the digit's English name and its box, xyxy integers 0-999 of the canvas."""

    desc: str
    bbox_2d: list[int]


@dataclass(frozen=True)
class Scene:
    """`pixels`: float32 [HEIGHT, WIDTH] in 0..16; `objects`: left to right, then top to bottom."""

    pixels: np.ndarray
    objects: list[SceneObject]


@functools.cache
def digit_images(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images float32 [N, 8, 8] in 0..16, labels int [N] and indices into `load_digits` int [N] of a split."""
    data: Any = load_digits()
    indices = np.arange(len(data.target))
    chosen = indices[(indices % 5 == 4) == (split == "heldout")]
    return data.images[chosen].astype(np.float32), data.target[chosen], chosen


def _box(ink: np.ndarray, top: int, left: int) -> list[int]:
    """The xyxy box (0-999) around the inked pixels of an 8x8 digit at (top, left)."""
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    edges = (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1)
    sizes = (WIDTH, HEIGHT, WIDTH, HEIGHT)
    return [round(999 * int(edge) / size) for edge, size in zip(edges, sizes, strict=True)]


def _places(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """`count` (top, left) corners on the grid with non-overlapping 8x8 cells."""
    while True:
        tops = GRID * rng.integers(0, (HEIGHT - _SIDE) // GRID + 1, size=count)
        lefts = GRID * rng.integers(0, (WIDTH - _SIDE) // GRID + 1, size=count)
        apart = count == 1 or abs(tops[0] - tops[1]) >= _SIDE or abs(lefts[0] - lefts[1]) >= _SIDE
        if apart:
            return [(int(top), int(left)) for top, left in zip(tops, lefts, strict=True)]


def make_scene(split: Split, rng: np.random.Generator) -> Scene:
    """Draw one scene from the split's digit images."""
    images, labels, _ = digit_images(split)
    pixels = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    objects: list[SceneObject] = []
    for top, left in _places(rng, 2 if rng.random() < PAIR_PROBABILITY else 1):
        choice = int(rng.integers(len(images)))
        pixels[top : top + _SIDE, left : left + _SIDE] = images[choice]
        box = _box(images[choice] >= _INK_THRESHOLD, top, left)
        objects.append({"desc": WORDS[int(labels[choice])], "bbox_2d": box})
    objects.sort(key=lambda item: (item["bbox_2d"][0], item["bbox_2d"][1]))
    return Scene(pixels, objects)


def scenes(split: Split, count: int, seed: int) -> Iterator[Scene]:
    """`count` scenes, each from its own generator keyed by (seed, split, index)."""
    for index in range(count):
        yield make_scene(split, np.random.default_rng((seed, _SPLIT_KEYS[split], index)))
