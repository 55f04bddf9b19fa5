"""Pictures of scenes: training scenes as files for the dashboard, held-out ones drawn for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sluice.demo.digits.data import records
from sluice.demo.digits.evaluate import read_objects
from sluice.demo.digits.scenes import Scene, Split, scenes
from sluice.demo.tiny.jsonl import write_records

_SCALE = 14  # drawn pixels per scene pixel
_INK_MAX = 16.0


def write_with_pictures(path: Path, split: Split, count: int, seed: int) -> Path:
    """Write the records as JSONL, and each scene as a PNG in `scenes` next to it, referenced by its metadata."""
    folder = path.parent / "scenes"
    folder.mkdir(parents=True, exist_ok=True)

    def drawn() -> Iterator[dict[str, Any]]:
        for index, (record, scene) in enumerate(
            zip(records(split, count, seed), scenes(split, count, seed), strict=True)
        ):
            name = f"{index:06d}.png"
            grey = np.clip(255 * (1 - scene.pixels / _INK_MAX), 0, 255).round().astype(np.uint8)
            Image.fromarray(grey).save(folder / name)
            yield {**record, "metadata": {"picture": f"{folder.name}/{name}"}}

    return write_records(path, drawn())


def pictures(scenes: Sequence[Scene], before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
    """One dict per scene, for digits.html.j2."""
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
