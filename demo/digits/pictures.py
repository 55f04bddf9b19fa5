"""Pictures of scenes: training scenes as PNG files, held-out ones drawn for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sluice.demo.answers import AnswerView, Box, Picture, ProblemView, shortened
from sluice.demo.digits.data import records
from sluice.demo.digits.evaluate import num_hits, read_objects
from sluice.demo.digits.scenes import Scene, Split, scenes
from sluice.demo.tiny.jsonl import write_records

_SCALE = 14  # drawn pixels per scene pixel
_INK_MAX = 16.0
_FOLDER = "scenes"
_MOST_BOXES = 12  # of an answer, in a drawing


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


def problem_view(scene: Scene) -> ProblemView:
    """The scene with its true boxes."""
    height, width = scene.pixels.shape
    boxes = [_box(item, scene) for item in scene.objects]
    words = " and ".join(item["desc"] for item in scene.objects)
    return ProblemView("scene", words, Picture(_data_url(draw(scene)), width * _SCALE, height * _SCALE, boxes))


def answer_view(scene: Scene, text: str) -> AnswerView:
    """The predicted boxes, the text itself, and how many objects are right by the rule of the held-out F1."""
    found = read_objects(text)
    hits, true = num_hits(found, scene.objects), len(scene.objects)
    f1 = 2 * hits / (len(found) + true)
    state = "good" if f1 == 1 else "warn" if hits else "bad"
    more = f", {len(found)} predicted" if len(found) != true else ""
    return AnswerView(
        [shortened(text)], f"{hits} of {true} right{more}", state, [_box(item, scene) for item in found[:_MOST_BOXES]]
    )


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _box(item: Any, scene: Scene) -> Box:
    height, width = (size * _SCALE for size in scene.pixels.shape)
    x1, y1, x2, y2 = (
        edge * size / 999 for edge, size in zip(item["bbox_2d"], (width, height, width, height), strict=True)
    )
    return Box(item["desc"], round(x1, 1), round(y1, 1), round(max(0.0, x2 - x1), 1), round(max(0.0, y2 - y1), 1))
