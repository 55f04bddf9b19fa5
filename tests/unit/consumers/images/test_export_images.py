"""Exports of sequences that show images: what each format's readers get, and what isn't exported as text instead."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.consumers.export.run import export_run
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DataError
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, TokenArray
from sluice.producers.source import Row, read_rows
from tests.seen_samples import image_files, taught_sample
from tests.tiny_vision_models import pictures


@pytest.fixture
def run(config: Config, processor: VisionProcessor, tmp_path: Path) -> Path:
    """A group of two with two images, and a sequence without any."""
    refs = image_files(tmp_path / "scans", 2)
    group = [taught_sample(f"g{at}", config, processor, refs) for at in range(2)]
    return kept(tmp_path, *group, taught_sample("text", config, processor, []))


def kept(tmp_path: Path, *samples: TrainingSample) -> Path:
    KeptRollouts(tmp_path / "run/rollouts", None).save(1, samples)
    return tmp_path / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_each_image_once_beside_it_by_digest(run: Path, config: Config, tmp_path: Path) -> None:
    assert export_run(run, "jsonl", tmp_path / "out/all.jsonl", "trained", config).sequences == 3
    first, second, text = lines(tmp_path / "out/all.jsonl")
    files = sorted((tmp_path / "out/all-images").iterdir())
    assert len(files) == 2
    assert first["images"] == second["images"]
    for at, named in enumerate(first["images"]):
        data = (tmp_path / "out" / named["path"]).read_bytes()
        assert data == (tmp_path / f"scans/0-{at}.png").read_bytes()
        assert named["sha256"] == sha256(data).hexdigest()
    assert text["images"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["all-images", "all.jsonl"]
    (tmp_path / "out/all.jsonl").unlink()
    with pytest.raises(DataError, match="all-images exists; name another"):
        export_run(run, "jsonl", tmp_path / "out/all.jsonl", "trained", config)


def test_prompts_read_the_images_of_an_export(run: Path, config: Config, tmp_path: Path) -> None:
    """The column is one that `sluice produce` takes, with images.roots the export's directory."""
    export_run(run, "jsonl", tmp_path / "all.jsonl", "trained", config)
    [row, *_] = lines(tmp_path / "all.jsonl")
    parts = [{"type": "image"}, {"type": "image"}]
    asked = {"messages": [{"role": "user", "content": parts}], "images": row["images"]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked))
    [found] = read_rows(replace(config.data, path=str(tmp_path / "prompts.jsonl")))
    assert isinstance(found, Row)
    assert [ref.path for ref in found.image_refs()] == [image["path"] for image in row["images"]]


@pytest.mark.parametrize("to", ["parquet", "datasets"])
def test_datasets_finds_images(run: Path, config: Config, tmp_path: Path, to: Any) -> None:
    datasets = pytest.importorskip("datasets")
    out = tmp_path / "out"
    export_run(run, to, out, "trained", config)
    what = {"path": "parquet", "data_files": str(out)} if to == "parquet" else {"path": str(out)}
    rows = datasets.load_dataset(**what, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["images"] == datasets.List(datasets.Image())
    assert [len(images) for images in rows["images"]] == [2, 2, 0]
    for found, expected in zip(rows[0]["images"], pictures(2), strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert rows[0]["target"] == "a small <g0> box<|im_end|>"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["out", "run", "scans"]


def test_an_image_that_is_gone_or_changed_is_named_and_its_rows_are_counted(
    run: Path, config: Config, tmp_path: Path
) -> None:
    for damage in ("gone", "changed"):
        file = tmp_path / "scans/0-1.png"
        file.unlink() if damage == "gone" else file.write_bytes((tmp_path / "scans/0-0.png").read_bytes())
        done = export_run(run, "jsonl", tmp_path / damage, "trained", config)
        assert (done.sequences, done.left_out) == (1, {"image_failed": 2})
        [said] = done.lines()
        assert "first: g0:0: image '0-1.png'" in said
        assert ("no such file" if damage == "gone" else "its bytes have sha256") in said
        [row] = lines(tmp_path / damage)
        assert (row["seq_id"], row["images"]) == ("text:0", [])
    done = export_run(run, "jsonl", tmp_path / "named", "trained", config, "references")
    assert (done.sequences, done.left_out) == (3, {})
    first = lines(tmp_path / "named")[0]["images"]
    assert [image["path"] for image in first] == ["0-0.png", "0-1.png"]
    assert all(len(image["sha256"]) == 64 for image in first)
    assert not (tmp_path / "named-images").exists()


def test_the_card_counts_a_failed_image_and_names_no_path(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    refs = [replace(ref, path=str(tmp_path / "scans" / (ref.path or ""))) for ref in image_files(tmp_path / "scans", 2)]
    samples = [taught_sample("g0", config, processor, refs), taught_sample("text", config, processor, [])]
    (tmp_path / "scans/0-0.png").unlink()
    done = export_run(kept(tmp_path, *samples), "datasets", tmp_path / "out", "trained", config)
    assert "no such file" in done.first["image_failed"], "the terminal names it"
    text = (tmp_path / "out/README.md").read_text()
    assert "- 1 left out: an image is gone, changed or not accepted" in text
    assert "0-0.png" not in text
    assert str(tmp_path) not in text


def test_trouble_of_a_disk_is_no_fault_of_an_image(run: Path, config: Config, tmp_path: Path) -> None:
    (tmp_path / "scans").rename(tmp_path / "elsewhere")
    with pytest.raises(SourceUnavailable, match=r"scans is not a directory; check .*--images references"):
        export_run(run, "parquet", tmp_path / "out", "trained", config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run"]


def test_trl_gets_text_with_one_placeholder_for_each_image(
    run: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    done = export_run(run, "trl", tmp_path / "sft", "trained", config)
    assert (done.sequences, done.reread) == (3, 0)
    rows = datasets.load_from_disk(str(tmp_path / "sft"))
    assert rows.column_names == ["prompt", "completion", "images"]
    mark = processor.image_token
    assert rows[0]["prompt"] == f"see {mark} is 0{mark} is 1 what?"
    assert rows[0]["completion"] == "a small <g0> box<|im_end|>"
    assert (rows[2]["prompt"], rows[2]["images"]) == ("see  what?", [])
    assert [image.size for image in rows[0]["images"]] == [image.size for image in pictures(2)]


def test_trl_leaves_out_what_a_text_cannot_say(config: Config, processor: VisionProcessor, tmp_path: Path) -> None:
    refs = image_files(tmp_path / "scans", 1)
    good = taught_sample("good", config, processor, refs)
    at = good.prompt_len + 3
    torn = [*good.token_ids[:-1], HFTextCodec(config.model.path).encode("é")[0]]
    weights, labels = list(good.weights), list(good.labels)
    weights[at], labels[at] = 0.0, labels[at] + 1
    whole = [1.0] * len(weights)
    samples = [
        good,
        replace(good, seq_id="gap:0", weights=FloatArray(weights)),
        replace(good, seq_id="label:0", labels=TokenArray(labels)),
        replace(good, seq_id="late:0", weights=FloatArray(whole)),
        replace(good, seq_id="off:0", weights=FloatArray([0.0] * len(weights))),
        replace(good, seq_id="other:0", images=refs * 2),
        replace(good, seq_id="torn:0", token_ids=TokenArray(torn), labels=TokenArray(torn)),
    ]
    done = export_run(kept(tmp_path, *samples), "trl", tmp_path / "sft", "trained", config)
    assert (done.sequences, done.reread) == (2, 1)
    assert done.left_out == {"gaps": 1, "relabelled": 1, "late_image": 1, "no_weight": 1, "image_failed": 1}
    assert [done.first[rule].partition(":")[0] for rule in ("gaps", "relabelled", "late_image")] == [
        "gap",
        "label",
        "late",
    ]
    with pytest.raises(ConfigError, match="TRL takes the images themselves"):
        export_run(tmp_path / "run", "trl", tmp_path / "none", "trained", config, "references")


def test_an_export_of_nothing_says_why(config: Config, processor: VisionProcessor, tmp_path: Path) -> None:
    refs, _ = image_files(tmp_path / "scans", 1), image_files(tmp_path / "scans", 1, seed=1)
    run = kept(tmp_path, taught_sample("one", config, processor, refs))
    (tmp_path / "scans/0-0.png").unlink()
    with pytest.raises(DataError, match=r"nothing to export: 1 left out: an image is gone.*first: one:0: image '0-0"):
        export_run(run, "datasets", tmp_path / "out", "trained", config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "scans"]
