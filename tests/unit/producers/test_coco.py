"""`sluice data coco`: boxes on the grid of the detection task, and every rule by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from sluice.consumers.tasks.detection.geometry import is_box
from sluice.pipeline.config.types import DataConfig
from sluice.pipeline.errors import DataError
from sluice.producers.coco import RULES, Converted, convert, summary
from sluice.producers.source import Row, read_rows

SIZE = (200, 100)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    scene = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(scene).rectangle((20, 10, 119, 59), fill="red")
    for name in ("a.png", "sub/b.png"):
        scene.save(folder / name)
    turned = Image.new("RGB", (100, 200))
    exif = turned.getexif()
    exif[0x0112] = 6  # on its side: upright it is 200 x 100
    turned.save(folder / "turned.jpg", exif=exif)
    turned.save(folder / "turned.png", exif=exif)
    turned.save(folder / "broken exif.png", exif=b"Exif\0\0junk")
    Image.new("RGB", (10, 10)).save(folder / "small.png")
    (folder / "text.png").write_text("no picture")
    Image.new("RGB", SIZE).save(tmp_path / "outside.png")
    return folder


def image(at: int, name: str, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    return {"id": at, "file_name": name, "width": size[0], "height": size[1], "license": 1}


def box(image_id: int, bbox: list[float], category: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "id": 9,
        "image_id": image_id,
        "category_id": category,
        "bbox": bbox,
        "area": 1.0,
        "segmentation": [],
        **more,
    }


def made(
    tmp_path: Path, pictures: Path, images: list[Any], annotations: list[Any], **options: Any
) -> tuple[Converted, list[dict[str, Any]]]:
    names = [{"id": 1, "name": "red box", "supercategory": "x"}, {"id": 7, "name": "hat"}]
    source, out = tmp_path / "set.json", tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"info": {}, "images": images, "annotations": annotations, "categories": names}))
    said = convert(source, pictures, out, **options)
    return said, [json.loads(line) for line in out.read_text().splitlines()]


def test_boxes_are_xyxy_on_the_grid_of_the_picture(tmp_path: Path, pictures: Path) -> None:
    annotations = [box(5, [20, 10, 100, 50]), box(5, [0, 0, 200, 100], 7), box(6, [99.5, 49.5, 0.4, 1])]
    said, rows = made(tmp_path, pictures, [image(5, "a.png"), image(6, "sub/b.png")], annotations)
    assert [row["truth"] for row in rows] == [
        [{"desc": "red box", "bbox_2d": [100, 100, 599, 599]}, {"desc": "hat", "bbox_2d": [0, 0, 999, 999]}],
        [{"desc": "red box", "bbox_2d": [497, 495, 499, 504]}],
    ]
    assert all(is_box(item["bbox_2d"]) for row in rows for item in row["truth"])
    assert (said.rows, said.boxes, dict(said.left_out)) == (2, 3, {})
    assert [(row["id"], row["images"]) for row in rows] == [(5, ["a.png"]), (6, ["sub/b.png"])]
    assert "red box, hat" in rows[0]["messages"][0]["content"][1]["text"]


def test_the_rows_are_read_as_prompts_and_the_prompt_is_yours(tmp_path: Path, pictures: Path) -> None:
    made(tmp_path, pictures, [image(5, "a.png")], [box(5, [20, 10, 100, 50])], prompt="{categories}: find {them}")
    [row] = read_rows(DataConfig(path=str(tmp_path / "rows.jsonl")))
    assert isinstance(row, Row)
    assert row.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "red box, hat: find {them}"}]
    assert row.id == 5


@pytest.mark.parametrize(
    ("bbox", "more", "rule"),
    [
        ([20, 10, 100, 50], {"iscrowd": 1}, "crowd"),
        ([20, 10, 0, 50], {}, "degenerate"),
        ([20, 10, 30, -5], {}, "degenerate"),
        ([20, 10, 0.01, 50], {}, "degenerate"),
        ([199.99, 10, 50, 50], {}, "degenerate"),  # nothing of it is left once it is clipped
        ([1e300, 10, 1e300, 50], {}, "outside"),
        ([200, 10, 10, 10], {}, "outside"),
        ([-30, 10, 30, 10], {}, "outside"),
        ([20, 10, 100, 50], {"category_id": 3}, "unknown"),
        ([20, 10, 100, 50], {"image_id": 3}, "unknown"),
    ],
)
def test_a_box_that_can_not_be_a_truth_is_left_out_by_name(
    tmp_path: Path, pictures: Path, bbox: list[float], more: dict[str, Any], rule: str
) -> None:
    said, [row] = made(tmp_path, pictures, [image(5, "a.png")], [box(5, bbox) | more, box(5, [0, 0, 100, 50])])
    assert row["truth"] == [{"desc": "red box", "bbox_2d": [0, 0, 500, 500]}]
    assert dict(said.left_out) == {rule: 1}
    assert any(rule in line and said.first[rule] in line for line in summary(said, tmp_path, pictures))


def test_a_box_that_leaves_the_picture_is_clipped_and_counted(tmp_path: Path, pictures: Path) -> None:
    annotations = [box(5, [-20, 50, 120, 90]), box(5, [0, 0, 200.4, 100.4])]
    said, [row] = made(tmp_path, pictures, [image(5, "a.png")], annotations)
    assert [item["bbox_2d"] for item in row["truth"]] == [[0, 500, 500, 999], [0, 0, 999, 999]]
    assert dict(said.left_out) == {"clipped": 1}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none.png", "no_file"),
        ("../outside.png", "no_file"),
        ("text.png", "no_file"),
        ("sub", "no_file"),
        ("broken exif.png", "no_file"),
        ("small.png", "other_size"),
    ],
)
def test_a_picture_that_can_not_be_used_costs_its_row(tmp_path: Path, pictures: Path, name: str, rule: str) -> None:
    annotations = [box(5, [20, 10, 100, 50]), box(6, [20, 10, 100, 50])]
    said, rows = made(tmp_path, pictures, [image(5, name), image(6, "a.png")], annotations)
    assert [row["id"] for row in rows] == [6]
    assert dict(said.left_out) == {rule: 1}
    assert name in said.first[rule]


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png"])
def test_sizes_are_those_of_the_upright_picture(tmp_path: Path, pictures: Path, name: str) -> None:
    said, rows = made(tmp_path, pictures, [image(5, name)], [box(5, [20, 10, 100, 50])])
    assert len(rows) == said.rows == 1


def test_only_the_header_of_a_picture_is_read(tmp_path: Path, pictures: Path) -> None:
    whole = (pictures / "a.png").read_bytes()
    (pictures / "cut.png").write_bytes(whole[: whole.index(b"IDAT") + 8])
    said, rows = made(tmp_path, pictures, [image(5, "cut.png")], [box(5, [20, 10, 100, 50])])
    assert len(rows) == said.rows == 1


def test_a_picture_without_a_box_has_no_row_unless_it_never_had_one(tmp_path: Path, pictures: Path) -> None:
    images = [image(5, "a.png"), image(6, "sub/b.png"), image(7, "turned.jpg")]
    annotations = [box(5, [20, 10, 100, 50]), box(6, [0, 0, 10, 10], iscrowd=1)]
    said, rows = made(tmp_path, pictures, images, annotations)
    assert [row["id"] for row in rows] == [5]
    assert said.left_out == {"crowd": 1, "no_box": 2}
    _, rows = made(tmp_path, pictures, images, annotations, keep_empty=True)
    assert [(row["id"], len(row["truth"])) for row in rows] == [(5, 1), (7, 0)]


def test_a_picture_whose_only_category_is_not_listed_is_not_an_empty_one(tmp_path: Path, pictures: Path) -> None:
    images, annotations = [image(5, "a.png"), image(6, "sub/b.png")], [box(6, [20, 10, 100, 50], category=3)]
    said, rows = made(tmp_path, pictures, images, annotations, keep_empty=True)
    assert [row["id"] for row in rows] == [5]
    assert said.left_out == {"unknown": 1, "no_box": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not a COCO detection set"),
        ("{", "not a COCO detection set"),
        ('{"images": [], "annotations": []}', "categories"),
        ('{"images": [], "annotations": [], "categories": []}', "no images"),
        (
            '{"images": [{"id": 1, "file_name": "a", "width": 0, "height": 1}], "annotations": [], "categories": []}',
            "0 x",
        ),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": " "}]}', "no name"),
        ('{"images": [], "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1]}], "categories": []}', "bbox"),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}', "twice"),
    ],
)
def test_a_file_that_is_no_set_is_refused_with_its_place(tmp_path: Path, pictures: Path, text: str, words: str) -> None:
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(DataError, match=words):
        convert(tmp_path / "set.json", pictures, tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_every_rule_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/handoff.md").read_text()
    assert [rule for rule in RULES if f"`{rule}`" not in page] == []
