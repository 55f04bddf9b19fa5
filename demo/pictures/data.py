"""Scenes as PNG files, and as the JSONL that the pipeline reads, one line each.

{"id": ..., "messages": [...], "images": ["scenes/000000.png"], "truth": [...]}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from sluice.demo.digits.pictures import draw, save_picture
from sluice.demo.digits.scenes import Canvas, Scene, Split, scenes
from sluice.demo.tiny.jsonl import write_records

CANVAS = Canvas(12, 20, grid=4)
"""A digit covers whole tokens of the vision tower (processor.py). With `grid=2` it may begin in the middle of one, and
reading took four times as many scenes to learn."""
SCALE = 4
"""Pixels of the PNG per scene pixel."""


def messages_of(scene: Scene) -> list[dict[str, Any]]:
    """One user turn that is the picture; the same for all scenes."""
    return [{"role": "user", "content": [{"type": "image"}]}]


def picture_of(scene: Scene) -> Image.Image:
    """The scene as its PNG shows it, mode RGB, as the pipeline decodes it."""
    return draw(scene, SCALE).convert("RGB")


def pictured_scenes(split: Split, count: int, seed: int) -> Iterator[Scene]:
    """`count` scenes of this task's canvas."""
    return scenes(split, count, seed, CANVAS)


def write_jsonl(path: Path, split: Split, count: int, seed: int, beside: str = "") -> Path:
    """Write `count` records to `path`, and the scenes in a folder beside it; `beside`: where that is from the root."""

    def records() -> Iterator[dict[str, Any]]:
        for index, scene in enumerate(pictured_scenes(split, count, seed)):
            yield {
                "id": f"pictures-{split}-{seed}-{index:06d}",
                "messages": messages_of(scene),
                "images": [beside + save_picture(path, index, scene, SCALE)],
                "truth": scene.objects,
            }

    return write_records(path, records())
