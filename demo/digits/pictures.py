"""Pictures of scenes: training scenes as PNG files, held-out ones drawn for the report."""

from __future__ import annotations

import base64
import io
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
_FOLDER = "scenes"


def draw(scene: Scene, scale: int = 1) -> Image.Image:
    """Dark ink on white paper, mode L, `scale` pixels per scene pixel."""
    grey = np.clip(255 * (1 - scene.pixels / _INK_MAX), 0, 255).round().astype(np.uint8)
    return Image.fromarray(grey.repeat(scale, axis=0).repeat(scale, axis=1))


def save_picture(beside: Path, index: int, scene: Scene, scale: int = 1) -> str:
    """Write the scene as a PNG in the folder `scenes` next to a file; its path from there."""
    name = f"{_FOLDER}/{index:06d}.png"
    target = beside.parent / name
    target.parent.mkdir(parents=True, exist_ok=True)
    draw(scene, scale).save(target)
    return name


def write_with_pictures(path: Path, split: Split, count: int, seed: int) -> Path:
    """Write the records as JSONL; the metadata of each names its scene's PNG."""

    def drawn() -> Iterator[dict[str, Any]]:
        shown = zip(records(split, count, seed), scenes(split, count, seed), strict=True)
        for index, (record, scene) in enumerate(shown):
            yield {**record, "metadata": {"picture": save_picture(path, index, scene)}}

    return write_records(path, drawn())


def pictures(scenes: Sequence[Scene], before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
    """One dict per scene, for digits.html.j2."""
    return [
        {
            "width": scene.pixels.shape[1] * _SCALE,
            "height": scene.pixels.shape[0] * _SCALE,
            "png": _data_url(draw(scene)),
            "truth": [_box(item, scene) for item in scene.objects],
            "views": [
                {"name": "warm start", "boxes": [_box(item, scene) for item in read_objects(first)]},
                {"name": "after training", "boxes": [_box(item, scene) for item in read_objects(second)]},
            ],
        }
        for scene, first, second in zip(scenes, before, after, strict=True)
    ]


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _box(item: Any, scene: Scene) -> dict[str, Any]:
    height, width = (size * _SCALE for size in scene.pixels.shape)
    x1, y1, x2, y2 = item["bbox_2d"]
    left, top = x1 * width / 999, y1 * height / 999
    return {"x": left, "y": top, "w": x2 * width / 999 - left, "h": y2 * height / 999 - top, "name": item["desc"]}
