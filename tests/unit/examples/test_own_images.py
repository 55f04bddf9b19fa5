"""The example's boxes are on the grid of all other truths: 999 is the right and the lower edge."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.user_modules import load_object

EXAMPLE = Path(__file__).parents[3] / "examples/own_images.py"


@pytest.mark.parametrize(
    ("box", "bbox"),
    [
        ([0, 0, 64, 32], [0, 0, 999, 999]),
        ([60, 30, 64, 32], [937, 937, 999, 999]),
        ([-3, 8, 70, 40], [0, 250, 999, 999]),
    ],
)
def test_a_box_in_pixels_becomes_one_of_0_to_999(box: list[int], bbox: list[int]) -> None:
    truth = load_object(f"{EXAMPLE}:truth", "key")
    assert truth({"label": "cup", "box": box}, 64, 32) == {"desc": "cup", "bbox_2d": bbox}
