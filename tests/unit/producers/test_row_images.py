"""Images of rows, from JSONL, Parquet and `datasets`: references and bytes, as many as there are parts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sluice.pipeline.config.types import Config, DataConfig, ImagesConfig, WorkerConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.images.store import ImageWriter
from sluice.pipeline.wire.messages import ImageRef
from sluice.producers.source import (
    Malformed,
    Row,
    fingerprint,
    identity,
    look_at_rows,
    read_prompts,
    read_rows,
    stored,
)
from tests.pictures import huge_png, png

PART: dict[str, Any] = {"type": "image"}
FIRST, SECOND = png("red"), png("blue")
DIGESTS = [sha256(data).hexdigest() for data in (FIRST, SECOND)]
Save = Callable[[Path, list[dict[str, Any]]], DataConfig]


def asked(parts: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [PART] * parts + [{"type": "text", "text": "what?"}]}]


def as_jsonl(tmp_path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    def plain(value: Any) -> str:
        return base64.b64encode(value).decode()

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, default=plain) + "\n" for row in rows))
    return DataConfig(path=str(path))


def as_parquet(tmp_path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return DataConfig(path=str(path))


def as_dataset(tmp_path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    return DataConfig(path=str(tmp_path / "set"))


def read(config: DataConfig, **limits: Any) -> list[Row | Malformed]:
    return list(read_rows(config, images=ImagesConfig(**limits)))


@pytest.mark.parametrize("save", [as_jsonl, as_parquet, as_dataset])
def test_bytes_of_a_row_are_stored_by_digest_in_the_order_of_the_parts(tmp_path: Path, save: Save) -> None:
    images = [{"bytes": FIRST, "path": "a.png"}, {"bytes": SECOND, "path": None}]
    [row] = read(save(tmp_path, [{"messages": asked(2), "images": images}]))
    assert isinstance(row, Row)
    kept = stored(row, ImageWriter(tmp_path / "store", ImagesConfig()))
    assert kept.image_refs() == row.image_refs() == [ImageRef(sha256=digest) for digest in DIGESTS]
    assert identity(kept) == identity(row)
    for digest, data in zip(DIGESTS, (FIRST, SECOND), strict=True):
        assert (tmp_path / "store" / "sha256" / digest).read_bytes() == data
    assert stored(kept, ImageWriter(tmp_path / "none", ImagesConfig())) is kept


@pytest.mark.parametrize("save", [as_jsonl, as_parquet, as_dataset])
def test_paths_urls_and_digests_stay_references(tmp_path: Path, save: Save) -> None:
    named = ["scans/1.png", "https://images.example/2.png", f"sha256:{DIGESTS[0]}"]
    [row] = read(save(tmp_path, [{"messages": asked(3), "images": named}]))
    assert isinstance(row, Row)
    assert row.image_refs() == [ImageRef.of(name) for name in named]
    assert stored(row, ImageWriter(tmp_path / "none", ImagesConfig())) is row


@pytest.mark.parametrize("save", [as_parquet, as_dataset])
@pytest.mark.parametrize("images", [FIRST, [FIRST], {"bytes": FIRST, "path": "a.png"}])
def test_one_image_is_a_list_of_one_and_a_binary_value_is_its_bytes(tmp_path: Path, save: Save, images: Any) -> None:
    [row] = read(save(tmp_path, [{"messages": asked(), "images": images}]))
    assert isinstance(row, Row)
    assert row.image_refs() == [ImageRef(sha256=DIGESTS[0])]


@pytest.mark.parametrize("save", [as_jsonl, as_parquet, as_dataset])
def test_the_column_image_is_another_name_of_images(tmp_path: Path, save: Save) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    rows = [{"messages": messages, "image": {"bytes": FIRST, "path": "a.png"}} for messages in (asked(), text)]
    shown, hidden = read(save(tmp_path, rows))
    assert isinstance(shown, Row)
    assert shown.image_refs() == [ImageRef(sha256=DIGESTS[0])]
    assert isinstance(hidden, Malformed)
    assert "`images` has 1 entries and the messages have 0 image parts" in hidden.problem


@pytest.mark.parametrize("save", [as_jsonl, as_parquet, as_dataset])
def test_columns_that_are_null_count_as_absent(tmp_path: Path, save: Save) -> None:
    text = [{"role": "user", "content": "what?"}]
    rows: list[dict[str, Any]] = [
        {"messages": text, "images": None, "image": None, "id": None},
        {"messages": text, "images": None, "image": "a.png", "id": "b"},
        {"messages": text, "images": ["a.png"], "image": "a.png", "id": "c"},
    ]
    null, one, both = read(save(tmp_path, rows))
    assert isinstance(null, Row)
    assert (null.images, null.id) == ([], None)
    assert isinstance(one, Malformed)
    assert isinstance(both, Malformed)
    assert "both `image` and `images`" in both.problem


@pytest.mark.parametrize("name", ["image", "images"])
@pytest.mark.parametrize("several", [False, True])
def test_the_image_feature_of_datasets_is_read_without_decoding(tmp_path: Path, several: bool, name: str) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "outside.png").write_bytes(SECOND)
    huge = huge_png()  # decoding it would raise
    encoded = [{"bytes": huge, "path": None}, {"bytes": None, "path": str(tmp_path / "outside.png")}]
    kind = datasets.Image()
    columns = {"prompt": ["what?"] * 2, name: [[one] for one in encoded] if several else encoded}
    features = {"prompt": datasets.Value("string"), name: datasets.List(kind) if several else kind}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(str(tmp_path / "set"))
    config = DataConfig(path=str(tmp_path / "set"))
    first, second = read(config)
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert first.messages == [{"role": "user", "content": [PART, {"type": "text", "text": "what?"}]}]
    assert first.image_refs() == [ImageRef(sha256=sha256(huge).hexdigest())]
    assert len(second.image_refs()) == 1
    assert fingerprint(config) == fingerprint(config)


@pytest.mark.parametrize("save", [as_jsonl, as_parquet, as_dataset])
@pytest.mark.parametrize(("parts", "images"), [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_another_number_of_images_than_parts_is_an_error_of_that_row(
    tmp_path: Path, save: Save, parts: int, images: int
) -> None:
    rows = [{"messages": asked(parts), "images": ["a.png"] * images}, {"messages": asked(), "images": ["a.png"]}]
    bad, good = read(save(tmp_path, rows))
    assert isinstance(bad, Malformed)
    assert f"`images` has {images} entries and the messages have {parts} image parts" in bad.problem
    assert isinstance(good, Row)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ({"bytes": b"<html>"}, "accepted are"),
        ({"bytes": b""}, "accepted are"),
        ({"bytes": png() + bytes(1 << 20)}, r"images.max_mb"),
        ({"bytes": FIRST, "sha256": DIGESTS[1]}, "its bytes have sha256"),
        ({"path": None}, "neither bytes nor path"),
        ({"path": "a.png", "file": "b.png"}, "file"),
    ],
)
def test_what_is_no_picture_is_an_error_of_that_row(tmp_path: Path, image: dict[str, Any], words: str) -> None:
    [bad] = read(as_jsonl(tmp_path, [{"messages": asked(), "images": [image]}]), max_mb=0.5)
    assert isinstance(bad, Malformed)
    assert words in bad.problem
    assert bad.where.endswith("rows.jsonl:1")


def test_base64_that_is_none_and_a_picture_within_the_messages_are_errors(tmp_path: Path) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    rows = [
        {"messages": asked(), "images": [{"bytes": "A*A"}]},
        {"messages": [{"role": "user", "content": [url]}], "images": ["a.png"]},
    ]
    first, second = read(as_jsonl(tmp_path, rows))
    assert isinstance(first, Malformed)
    assert "base64" in first.problem
    assert isinstance(second, Malformed)
    assert "data URL" in second.problem


def test_more_images_than_a_prompt_may_have_are_an_error_of_that_row(tmp_path: Path) -> None:
    data = as_jsonl(tmp_path, [{"messages": asked(count), "images": ["a.png"] * count} for count in (2, 3)])
    good, bad = read_prompts(Config(data=data, images=ImagesConfig(max_per_prompt=2)))
    assert isinstance(good, Row)
    assert isinstance(bad, Malformed)
    assert "3 images; at most 2 are taken (images.max_per_prompt)" in bad.problem


def test_the_identity_of_a_row_with_references_is_the_one_it_always_had(tmp_path: Path) -> None:
    reference = {"path": None, "url": "http://images.example/3.png", "sha256": DIGESTS[0]}
    [row] = read(as_jsonl(tmp_path, [{"messages": asked(2), "images": ["a.png", reference]}]))
    assert isinstance(row, Row)
    assert json.loads(identity(row)) == [asked(2), ["a.png", reference]]


def test_of_a_parquet_file_with_pictures_a_few_rows_are_in_memory(tmp_path: Path) -> None:
    """64 pictures of 1 MB; a page holds a row group of 8 here, and pages are what the reader loads."""
    path = tmp_path / "noise.bmp"
    Image.effect_noise((1000, 1000), 100).save(path)
    data = path.read_bytes()
    rows = [{"messages": asked(), "images": [{"bytes": data + bytes([n])}]} for n in range(64)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=8, compression="none")
    before, most = pa.total_allocated_bytes(), 0
    for row in read_rows(DataConfig(path=str(tmp_path / "rows.parquet"))):
        assert isinstance(row, Row)
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 40 << 20


def test_a_start_whose_first_images_are_all_missing_is_refused(tmp_path: Path) -> None:
    """One that is missing costs its own row; all of them mean that images.roots is another directory."""
    named = [*(f"{at}.png" for at in range(20)), "sha256:" + "0" * 64]
    data = as_jsonl(tmp_path, [{"messages": asked(), "images": [image]} for image in named])
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans/other.png").write_bytes(FIRST)

    def config(root: str, workers: int = 1) -> Config:
        images = ImagesConfig(roots=(str(tmp_path / root),))
        return Config(data=data, images=images, run_dir=str(tmp_path), worker=WorkerConfig(count=workers))

    for root, why in (("nowhere", "nowhere is not a directory"), ("scans", "no such file below images.roots")):
        with pytest.raises(DataError, match=rf"row 1: image '0\.png': .*{why}.* Set images\.roots \(.*{root}\)"):
            look_at_rows(config(root), 30)
    assert look_at_rows(config("nowhere", workers=0), 30).read == 21, "workers of other hosts"
    (tmp_path / "scans/3.png").write_bytes(FIRST)
    assert look_at_rows(config("scans"), 30).read == 21
