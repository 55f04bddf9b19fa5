"""Images of the offline engine's caller: the same picture in whichever way it is handed over."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.decoders import Decoders, load_image
from tests.pictures import encoded


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders(ImagesConfig(max_pixels=5000, max_mb=1))
    yield made
    made.close()


def see_through() -> Image.Image:
    image = Image.new("RGBA", (4, 3), (10, 200, 30, 255))
    image.putpixel((1, 1), (0, 0, 0, 0))
    return image


@pytest.mark.parametrize("image", [see_through(), Image.new("I;16", (4, 3), 30_000)], ids=["RGBA", "16 bits of grey"])
def test_a_path_bytes_and_an_open_image_are_one_picture(tmp_path: Path, image: Image.Image, decoders: Decoders) -> None:
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    ways = [load_image(way, "x", decoders) for way in (data, tmp_path / "a.png", str(tmp_path / "a.png"), image)]
    assert {way.mode for way in ways} == {"RGB"}
    for way in ways[1:]:
        assert np.array_equal(np.array(way), np.array(ways[0]))


def test_an_open_image_stays_as_it_is(decoders: Decoders) -> None:
    image = see_through()
    load_image(image, "x", decoders)
    assert (image.mode, image.getpixel((1, 1))) == ("RGBA", (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere.png", "row 3: the image /nowhere.png: cannot be read"),
        (b"text", "row 3: the image: is data that starts with"),
        (7, "row 3: the image is a int; give a path, bytes or a PIL image"),
        (Image.new("RGB", (90, 90)), "90 x 90 pixels, images.max_pixels allows 5000"),
        (Image.open(BytesIO(encoded(Image.effect_noise((60, 60), 50))[:-80])), "row 3: the image: is damaged"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(source: Any, says: str, decoders: Decoders) -> None:
    with pytest.raises(RequestError, match=says):
        load_image(source, "row 3", decoders)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(3 << 30)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_fifo, r"is not a regular file \(mode p"),
        (_socket, r"is not a regular file \(mode s"),
        (Path.mkdir, r"is not a regular file \(mode d"),
        (lambda path: path.symlink_to("/dev/zero"), r"is not a regular file \(mode c"),
        (_sparse, r"has at least 3221225472 bytes, images\.max_mb allows 1048576"),
        (lambda path: path.symlink_to(path), "cannot be read"),
    ],
)
def test_only_a_regular_file_of_a_bounded_size_is_opened(
    tmp_path: Path, make: Callable[[Path], None], says: str, decoders: Decoders
) -> None:
    """A FIFO without a writer would block its reader for ever, a device might never end."""
    make(tmp_path / "a.png")
    with pytest.raises(RequestError, match=rf"^x: the image \S+/a\.png: {says}"):
        load_image(tmp_path / "a.png", "x", decoders)


def test_a_link_of_the_caller_is_followed(tmp_path: Path, decoders: Decoders) -> None:
    (tmp_path / "real.png").write_bytes(encoded(Image.new("RGB", (4, 3), "red")))
    (tmp_path / "a.png").symlink_to("real.png")
    assert load_image(str(tmp_path / "a.png"), "x", decoders).size == (4, 3)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(path: str, decoders: Decoders) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        load_image(path, "x", decoders)
