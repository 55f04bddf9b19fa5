"""Which picture files the dashboard reads, and which never."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest
from PIL import Image

from sluice.consumers.dashboard.picture import Source, check_picture, read_below, read_picture, sources_of
from sluice.pipeline.config.types import Config, DataConfig, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import ImageRef
from tests.factories import sequence_result


def png(width: int = 4, height: int = 2, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("L", (width, height), 7).save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data file's directory with a picture, beside a folder that nobody may read."""
    folder = tmp_path / "data"
    (folder / "scenes").mkdir(parents=True)
    (folder / "scenes" / "a.png").write_bytes(png())
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "b.png").write_bytes(png())
    return folder


def read(data: Path, name: str, max_mb: float = 1) -> bytes:
    return read_below([str(data)], Source((name,)), max_mb)


@pytest.mark.parametrize("name", ["scenes/a.png", "scenes/../scenes/./a.png", "{data}/scenes/a.png", "link.png"])
def test_a_file_below_the_directory_is_read(data: Path, name: str) -> None:
    (data / "link.png").symlink_to("scenes/a.png")
    assert read(data, name.format(data=data)) == png()


@pytest.mark.parametrize(
    "name",
    [
        "../private/b.png",
        "{data}/../private/b.png",
        "out.png",
        "out/b.png",
        "scenes/../../private/b.png",
        "/etc/hostname",
    ],
)
def test_nothing_outside_is_read(data: Path, name: str) -> None:
    (data / "out.png").symlink_to(data.parent / "private" / "b.png")
    (data / "out").symlink_to(data.parent / "private")
    with pytest.raises(RequestError, match="outside"):
        read(data, name.format(data=data))


def test_a_sibling_with_the_same_beginning_is_outside(data: Path) -> None:
    twin = data.parent / "data-of-others"
    twin.mkdir()
    (twin / "c.png").write_bytes(png())
    with pytest.raises(RequestError, match="outside"):
        read(data, "../data-of-others/c.png")


def test_what_is_no_regular_file_within_the_limits_is_refused(data: Path) -> None:
    os.mkfifo(data / "pipe.png")
    for name, reason in (
        ("pipe.png", "regular"), ("scenes", "regular|opened"), ("gone.png", "no such"), ("a\0b", "NUL"),
        ("x" * 5000, "too long"), ("broken\ud800", "Unicode"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=reason):
            read(data, name)
    with pytest.raises(RequestError, match="max_mb"):
        read(data, "scenes/a.png", max_mb=1e-6)


def test_only_images_by_their_content() -> None:
    found = check_picture(png(), ImagesConfig())
    assert (found.media_type, found.size) == ("image/png", (4, 2))
    assert check_picture(png(kind="JPEG"), ImagesConfig()).media_type == "image/jpeg"
    for data in (b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<html>", b"", png()[:20], b"%PDF-1.7"):
        with pytest.raises(RequestError, match="format"):
            check_picture(data, ImagesConfig())
    with pytest.raises(RequestError, match="format"):
        check_picture(png(kind="TIFF"), ImagesConfig())
    with pytest.raises(RequestError, match="format"):
        check_picture(png(), ImagesConfig(formats=("JPEG",)))
    with pytest.raises(RequestError, match="max_pixels"):
        check_picture(png(40, 40), ImagesConfig(max_pixels=1000))


def test_a_picture_on_its_side_counts_as_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert check_picture(png(4, 2, "JPEG", exif=exif), ImagesConfig()).size == (2, 4)


def test_a_jpeg_of_many_pictures_is_a_jpeg() -> None:
    more = [Image.new("L", (4, 2), 9)]
    found = check_picture(png(kind="MPO", save_all=True, append_images=more), ImagesConfig())
    assert (found.media_type, found.size) == ("image/jpeg", (4, 2))


def test_no_pixel_of_a_png_is_decoded() -> None:
    """Its pixels are broken, which only one who decodes them notices."""
    whole = png(4, 2)
    at = whole.index(b"IDAT") + 4
    broken = whole[:at] + bytes(8) + whole[at + 8 :]
    with pytest.raises(OSError, match="broken data"), Image.open(io.BytesIO(broken)) as image:
        image.load()
    assert check_picture(broken, ImagesConfig()).size == (4, 2)


def test_where_the_picture_of_a_sequence_is_named() -> None:
    digest = "0" * 63 + "A"
    named = {"picture": "scenes/a.png"}
    assert sources_of(sequence_result("j")) == []
    assert sources_of(sequence_result("j", metadata=named)) == [Source(("scenes/a.png",))]
    assert sources_of(sequence_result("j", metadata={"picture": ["x"]})) == []
    refs = [ImageRef(url="http://host/x.png"), ImageRef(path="b.png"), ImageRef(path="c.png", sha256=digest)]
    found = sources_of(sequence_result("j", images=refs, metadata=named))
    assert found == [Source(("b.png",)), Source(("c.png",), digest.lower())]
    [stored] = sources_of(sequence_result("j", images=[ImageRef(sha256=digest)]))
    assert stored.names[1] == f"sha256/{digest.lower()}"
    assert sources_of(sequence_result("j", images=[ImageRef(sha256="../x")])) == []


def test_a_picture_that_changed_since_it_was_decoded_is_not_shown(data: Path) -> None:
    digest = hashlib.sha256(png()).hexdigest()
    result = sequence_result("j", images=[ImageRef(path="scenes/a.png", sha256=digest)])
    config = Config(data=DataConfig(path=str(data / "train.jsonl")))
    assert read_picture(config, result) is not None
    (data / "scenes" / "a.png").write_bytes(png(6))
    with pytest.raises(RequestError, match="sha256"):
        read_picture(config, result)


def test_every_picture_of_a_prompt_is_found_by_its_number(data: Path) -> None:
    (data / "scenes" / "c.png").write_bytes(png(9))
    result = sequence_result("j", images=[ImageRef(path="scenes/a.png"), ImageRef(path="scenes/c.png")])
    config = Config(data=DataConfig(path=str(data / "train.jsonl")))
    second = read_picture(config, result, 1)
    assert second is not None
    assert second.size == (9, 2)
    assert read_picture(config, result, 2) is None


def test_roots_are_the_data_file_s_directory_and_those_for_images(data: Path) -> None:
    result = sequence_result("j", metadata={"picture": "b.png"})
    config = Config(data=DataConfig(path=str(data / "train.jsonl")))
    with pytest.raises(RequestError, match="no such"):
        read_picture(config, result)
    config = Config(data=config.data, images=ImagesConfig(roots=(str(data.parent / "private"),)))
    found = read_picture(config, result)
    assert found is not None
    assert found.size == (4, 2)
    with pytest.raises(RequestError, match="no such"):
        read_picture(Config(), result)
