"""The demo's definition of the pictures task: the digits task, with the scenes as PNG files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from PIL import Image

from sluice.demo.digits import task as digits
from sluice.demo.digits.scenes import Scene
from sluice.demo.pictures.data import messages_of, picture_of, pictured_scenes, write_jsonl
from sluice.demo.pictures.warm_start import ensure_warm_start


def _write(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "train", count, seed)


def _write_heldout(path: Path, count: int, seed: int) -> Path:
    return write_jsonl(path, "heldout", count, seed, f"{path.parent.name}/")


def _heldout(count: int, seed: int) -> list[Scene]:
    """The held-out scenes; their digits appear in no training scene."""
    return list(pictured_scenes("heldout", count, seed))


def _images(scene: Scene) -> tuple[Image.Image, ...]:
    return (picture_of(scene),)


TASK = replace(
    digits.TASK,
    name="pictures",
    title="reading handwritten digits in pictures",
    model="Qwen3-VL",
    config_file="demo-pictures.yaml",
    made="pictures.html.j2",
    seen="0.79 to 0.92 in fifteen runs",
    ensure_warm_start=lambda cache, on_progress: ensure_warm_start(cache, on_progress=on_progress),
    write_data=_write,
    heldout=_heldout,
    write_heldout=_write_heldout,
    messages=messages_of,
    images=_images,
    threads=1,  # its many small operations gain nothing from a second
)
