"""Untrusted bytes become an upright RGB image or an error that says what is wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.pixels import open_image
from tests.pictures import encoded, huge_png, huge_webp, png, wide_gif

LIMITS = ImagesConfig(max_pixels=10_000)


def gradient(width: int = 16, height: int = 8) -> Image.Image:
    """The left half is red, the right half blue."""
    image = Image.new("RGB", (width, height), "red")
    image.paste("blue", (width // 2, 0, width, height))
    return image


def looks(image: Image.Image, x: int = 0, y: int = 0) -> str:
    """Red, blue or neither."""
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    red, _, blue = pixel
    return "red" if red > 200 > 60 > blue else "blue" if blue > 200 > 60 > red else "neither"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_each_format_is_decoded_to_plain_rgb(kind: str) -> None:
    image = open_image(encoded(gradient(), kind), LIMITS, "x")
    assert (type(image), image.mode, image.size, image.info) == (Image.Image, "RGB", (16, 8), {})
    assert [looks(image, 1, 4), looks(image, 14, 4)] == ["red", "blue"]


@pytest.mark.parametrize(
    ("mode", "color", "options", "expected"),
    [
        ("RGBA", (0, 0, 0, 0), {}, (255, 255, 255)),
        ("RGBA", (255, 0, 0, 255), {}, (255, 0, 0)),
        ("RGBA", (0, 0, 0, 51), {}, (204, 204, 204)),
        ("LA", (0, 0), {}, (255, 255, 255)),
        ("P", 0, {"transparency": 0}, (255, 255, 255)),
        ("RGB", (1, 2, 3), {"transparency": (1, 2, 3)}, (255, 255, 255)),
        ("1", 1, {}, (255, 255, 255)),
        ("L", 7, {}, (7, 7, 7)),
        ("I;16", 128 * 257, {}, (128, 128, 128)),
    ],
)
def test_every_mode_comes_out_on_white(mode: str, color: Any, options: dict[str, Any], expected: object) -> None:
    data = encoded(Image.new(mode, (3, 3), color), **options)
    assert open_image(data, LIMITS, "x").getpixel((1, 1)) == expected


def test_the_camera_s_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, clockwise
    image = open_image(encoded(gradient(), "JPEG", exif=exif, quality=95), LIMITS, "x")
    assert image.size == (8, 16)
    assert [looks(image, 4, 2), looks(image, 4, 13)] == ["red", "blue"]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert looks(open_image(data, LIMITS, "x")) == "red"


JUNK_BEFORE_ITS_FRAME = wide_gif().replace(b"!\xfe", bytes(1000) + b"!\xfe", 1)


@pytest.mark.parametrize(
    "data", [huge_png(), huge_webp(), wide_gif(), JUNK_BEFORE_ITS_FRAME, png(width=101, height=100)]
)
def test_a_bomb_is_refused_by_its_header_without_a_warning(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RequestError, match=r"^x: is \d+ x \d+ pixels, images.max_pixels allows 10000"):
            open_image(data, LIMITS, "x")


def test_a_limit_above_pillow_s_own_is_ours_alone() -> None:
    with pytest.raises(RequestError, match="damaged"):  # let through, but there are no pixels
        open_image(huge_png(200_000, 1_000), ImagesConfig(max_pixels=10**9), "x")
    with pytest.raises(RequestError, match="is 60000 x 60000"):
        open_image(huge_png(), ImagesConfig(max_pixels=10**9), "x")


def test_an_empty_picture_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^x: (?:is damaged|claims 0 x 5)"):
        open_image(huge_png(0, 5), LIMITS, "x")
    with pytest.raises(RequestError, match="0 x 5 pixels, which is empty"):
        open_image(b"GIF89a\0\0\5\0\0\0\0;", LIMITS, "x")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_truncated_file_is_damaged(kind: str) -> None:
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    data = encoded(noise, kind)
    with pytest.raises(RequestError, match=f"^x: is damaged or not a {kind}"):
        open_image(data[: len(data) // 2], LIMITS, "x")


def test_a_flipped_bit_of_a_png_is_noticed() -> None:
    data = bytearray(encoded(Image.effect_noise((32, 32), 90)))
    data[len(data) // 2] ^= 1
    with pytest.raises(RequestError, match="damaged"):
        open_image(bytes(data), LIMITS, "x")


@pytest.mark.parametrize("data", [b"", b"a text named .png", b'<svg xmlns="http://www.w3.org/2000/svg"/>', b"%PDF-1.7"])
def test_what_is_no_listed_format_is_named(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"^x: is data that starts with .*, accepted are JPEG, PNG"):
        open_image(data, LIMITS, "x")


def test_a_format_that_is_not_listed_is_refused() -> None:
    with pytest.raises(RequestError, match="is GIF, accepted are PNG;"):
        open_image(encoded(gradient(), "GIF"), ImagesConfig(formats=("PNG",)), "x")


def test_encoded_bytes_are_bounded() -> None:
    with pytest.raises(RequestError, match=r"images\.max_mb allows 10"):
        open_image(png(), ImagesConfig(max_mb=10 / 2**20), "x")


@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]), st.data())
def test_mangled_bytes_give_an_image_or_an_error_of_ours(kind: str, draw: st.DataObject) -> None:
    data = bytearray(encoded(gradient(), kind))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = open_image(bytes(data), LIMITS, "x")
        except RequestError:
            return
    assert image.mode == "RGB"
    assert image.width * image.height <= LIMITS.max_pixels
