"""Held-out scenes as the report draws them: pixels, true boxes, and what the model wrote before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from demo.digits.evaluate import read_objects
from demo.digits.scenes import Scene

_SCALE = 14  # drawn pixels per scene pixel
_INK_MAX = 16.0


def pictures(scenes: Sequence[Scene], before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
    """One dict a scene, for digits.html.j2."""
    return [
        {
            "width": scene.pixels.shape[1] * _SCALE,
            "height": scene.pixels.shape[0] * _SCALE,
            "scale": _SCALE,
            "cells": _cells(scene.pixels),
            "truth": [_box(item, scene) for item in scene.objects],
            "views": [
                {"name": "warm start", "boxes": [_box(item, scene) for item in read_objects(first)]},
                {"name": "after training", "boxes": [_box(item, scene) for item in read_objects(second)]},
            ],
        }
        for scene, first, second in zip(scenes, before, after, strict=True)
    ]


def _cells(pixels: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"x": x * _SCALE, "y": y * _SCALE, "shade": round(255 * (1 - float(pixels[y, x]) / _INK_MAX))}
        for y in range(pixels.shape[0])
        for x in range(pixels.shape[1])
        if pixels[y, x] > 0
    ]


def _box(item: Any, scene: Scene) -> dict[str, Any]:
    height, width = (size * _SCALE for size in scene.pixels.shape)
    x1, y1, x2, y2 = item["bbox_2d"]
    left, top = x1 * width / 999, y1 * height / 999
    return {"x": left, "y": top, "w": x2 * width / 999 - left, "h": y2 * height / 999 - top, "name": item["desc"]}
