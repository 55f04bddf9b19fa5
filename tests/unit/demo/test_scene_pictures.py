"""The training scenes as files that the dashboard shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from sluice.demo.digits.pictures import write_with_pictures
from sluice.demo.digits.scenes import scenes


def test_every_row_names_its_scene(tmp_path: Path) -> None:
    path = write_with_pictures(tmp_path / "train.jsonl", "train", 3, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, scene in zip(rows, scenes("train", 3, 2), strict=True):
        with Image.open(tmp_path / row["metadata"]["picture"]) as image:
            assert image.size == scene.pixels.shape[::-1]
            ink = 1 - np.asarray(image, dtype=float) / 255
        assert np.abs(ink - scene.pixels / 16).max() < 0.01
        assert row["truth"] == scene.objects
