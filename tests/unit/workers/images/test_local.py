"""Images of the offline engine's caller: the same picture in whichever way it is handed over."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.config.types import ImagesConfig
from pipeline.errors import RequestError
from tests.pictures import encoded
from workers.images.local import load_image


def see_through() -> Image.Image:
    image = Image.new("RGBA", (4, 3), (10, 200, 30, 255))
    image.putpixel((1, 1), (0, 0, 0, 0))
    return image


@pytest.mark.parametrize("image", [see_through(), Image.new("I;16", (4, 3), 30_000)], ids=["RGBA", "16 bits of grey"])
def test_a_path_bytes_and_an_open_image_are_one_picture(tmp_path: Path, image: Image.Image) -> None:
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    ways = [load_image(way, "x") for way in (data, tmp_path / "a.png", str(tmp_path / "a.png"), image)]
    assert {way.mode for way in ways} == {"RGB"}
    for way in ways[1:]:
        assert np.array_equal(np.array(way), np.array(ways[0]))


def test_an_open_image_stays_as_it_is() -> None:
    image = see_through()
    load_image(image, "x")
    assert (image.mode, image.getpixel((1, 1))) == ("RGBA", (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere.png", "row 3: the image /nowhere.png cannot be read"),
        (b"text", "row 3: the image: is content that begins with"),
        (7, "row 3: the image is a int; give a path, bytes or a PIL image"),
        (Image.new("RGB", (90, 90)), "90 x 90 pixels, images.max_pixels allows 5000"),
        (Image.open(BytesIO(encoded(Image.effect_noise((60, 60), 50))[:-80])), "row 3: the image: is damaged"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(source: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load_image(source, "row 3", ImagesConfig(max_pixels=5000))
