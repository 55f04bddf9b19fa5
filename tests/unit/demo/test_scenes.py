from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sluice.demo.digits import data
from sluice.demo.digits.patches import NUM_PATCHES, patch_ids
from sluice.demo.digits.scenes import SMALL, WORDS, digit_images, make_scene, scenes


def test_train_and_heldout_share_no_digit_image() -> None:
    train, heldout = digit_images("train"), digit_images("heldout")
    assert not set(train[2]) & set(heldout[2])
    assert len(train[2]) + len(heldout[2]) == 1797
    assert set(heldout[1]) == set(range(10))


def test_truth_is_valid_and_ordered() -> None:
    counts = set()
    for scene in scenes("heldout", 200, seed=3):
        boxes = [item["bbox_2d"] for item in scene.objects]
        counts.add(len(boxes))
        assert boxes == sorted(boxes, key=lambda box: (box[0], box[1]))
        for item in scene.objects:
            left, top, right, bottom = item["bbox_2d"]
            assert item["desc"] in WORDS
            assert 0 <= left < right <= 999
            assert 0 <= top < bottom <= 999
    assert counts == {1, 2}


def test_every_box_holds_ink() -> None:
    for scene in scenes("train", 50, seed=4):
        for item in scene.objects:
            left, top, right, bottom = np.array(item["bbox_2d"]) / 999 * np.array([SMALL.width, SMALL.height] * 2)
            assert scene.pixels[round(top) : round(bottom), round(left) : round(right)].max() >= 4


def test_scenes_follow_from_seed_and_index() -> None:
    longer, shorter = list(scenes("train", 5, seed=7)), list(scenes("train", 3, seed=7))
    for one, other in zip(longer, shorter, strict=False):
        assert one.objects == other.objects
        np.testing.assert_array_equal(one.pixels, other.pixels)
    assert longer[0].objects != next(scenes("heldout", 1, seed=7)).objects


def test_patches_are_in_the_codebook() -> None:
    ids = patch_ids(make_scene("heldout", np.random.default_rng(0)).pixels)
    assert ids.shape == (SMALL.height * SMALL.width // 4,)
    assert ids.min() >= 0
    assert ids.max() < NUM_PATCHES


def test_answer_is_the_binding_literal() -> None:
    text = data.answer_text([{"desc": "seven", "bbox_2d": [120, 40, 480, 400]}])
    assert text == '{"object_1": {"desc": "seven", "bbox_2d": [120, 40, 480, 400]}}'


def test_jsonl_has_stable_ids(tmp_path: Path) -> None:
    path = data.write_jsonl(tmp_path / "new" / "train.jsonl", "train", 20, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == list(data.records("train", 20, seed=2))
    assert rows[:5] == list(data.records("train", 5, seed=2))
    assert len({row["id"] for row in rows}) == 20


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data.write_jsonl(tmp_path / "train.jsonl", "train", 2, seed=2)
    before = path.read_text()

    def interrupt(*_: object) -> list[dict[str, str]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "messages_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.write_jsonl(path, "train", 3, seed=2)
    assert path.read_text() == before
    assert [item.name for item in tmp_path.iterdir()] == ["train.jsonl"]
