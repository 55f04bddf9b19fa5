"""Prompts: what a row may be, and what is said of one that cannot be used."""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipeline.errors import DataError
from sluice.pipeline.prompts.rows import Malformed
from sluice.pipeline.wire.messages import ImageRef
from sluice.workers.engine.requests import TextGenerationRequest, VlmGenerationRequest
from sluice.workers.offline.prompt_file import PromptRow, Scan, open_prompts
from tests.pictures import png

ASKED = [{"role": "user", "content": "hi"}]
SHOWN = [{"role": "user", "content": [{"type": "image"}]}]


def jsonl(tmp_path: Path, *rows: dict[str, Any] | str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def first_row(path: Path) -> PromptRow | Malformed:
    with open_prompts(str(path)) as prompts:
        return next(prompts.rows())[1]


def request_of(path: Path) -> Any:
    row = first_row(path)
    assert isinstance(row, PromptRow)
    return row.request("row 0", path.parent)


def test_the_three_kinds_of_prompt(tmp_path: Path) -> None:
    asked = TextGenerationRequest(messages=ASKED, request_id="row 0")
    assert request_of(jsonl(tmp_path, {"messages": ASKED})) == asked
    assert request_of(jsonl(tmp_path, {"prompt": "hi", "unknown": 1})) == asked
    tokens = request_of(jsonl(tmp_path, {"prompt_token_ids": [1, 2]}))
    assert tokens == TextGenerationRequest(prompt_token_ids=(1, 2), request_id="row 0")


@pytest.mark.parametrize("image", ["a.png", {"path": "a.png"}])
def test_an_image_path_begins_at_the_folder_of_the_file(tmp_path: Path, image: Any) -> None:
    asked = request_of(jsonl(tmp_path, {"prompt": "what?", "images": [image]}))
    assert isinstance(asked, VlmGenerationRequest)
    assert asked.images == (tmp_path / "a.png",)
    assert asked.messages == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    several = request_of(jsonl(tmp_path, {"prompt": "what?", "images": [image, "b.png"]}))
    assert several.images == (tmp_path / "a.png", tmp_path / "b.png")
    assert [part["type"] for part in several.messages[0]["content"]] == ["image", "image", "text"]
    absolute = request_of(jsonl(tmp_path, {"messages": SHOWN, "image": "/data/a.png"}))
    assert (absolute.messages, absolute.images) == (SHOWN, (Path("/data/a.png"),))


def test_every_kind_of_image_that_a_producer_reads(tmp_path: Path) -> None:
    digest, data = "0" * 64, png()
    named = [
        "http://x/a.png",
        {"path": "a.png", "sha256": digest},
        f"sha256:{digest}",
        {"bytes": b64encode(data).decode()},
    ]
    path = jsonl(tmp_path, {"prompt": "what?", "images": named})
    refs = (ImageRef(url="http://x/a.png"), ImageRef(path="a.png", sha256=digest), ImageRef(sha256=digest))
    assert request_of(path).images == (*refs, data)
    row = first_row(jsonl(tmp_path, {"prompt": "what?", "images": ["a.png", "b.png"]}))
    assert isinstance(row, PromptRow)
    rooted = row.request("row 0", tmp_path, anywhere=False)
    assert isinstance(rooted, VlmGenerationRequest)
    assert rooted.images == (ImageRef(path="a.png"), ImageRef(path="b.png")), "with images.roots: only below those"


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_images_as_datasets_stores_them(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"prompt": "one", "image": {"bytes": png("blue"), "path": "b.png"}}, {"prompt": "none", "image": None}]
    ).cast_column("image", datasets.Image())
    source = tmp_path / "in.parquet"
    rows.save_to_disk(str(source)) if kind == "datasets" else rows.to_parquet(str(source))
    with open_prompts(str(source)) as prompts:
        scan, found = prompts.scan(), [row for _, row in prompts.rows()]
    assert (scan.total, scan.with_image, scan.malformed) == (2, {0}, {})
    seen, text = found
    assert isinstance(seen, PromptRow)
    assert isinstance(text, PromptRow)
    asked = seen.request("row 0", tmp_path)
    assert isinstance(asked, VlmGenerationRequest)
    assert asked.images == (png("blue"),)
    assert [part["type"] for part in asked.messages[0]["content"]] == ["image", "text"]
    assert isinstance(text.request("row 1", tmp_path), TextGenerationRequest)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "exactly one of .* got none"),
        ({"prompt": "a", "messages": ASKED}, "got messages and prompt"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt_token_ids": []}, "`prompt_token_ids` is empty"),
        ({"messages": [{"role": "user"}]}, "needs a `role` string and `content`"),
        ({"prompt_token_ids": [1], "images": ["a"]}, "not `prompt_token_ids`"),
        ({"messages": ASKED, "images": ["a.png"]}, "`images` has 1 entries and the messages have 0 image parts"),
        ({"messages": SHOWN}, "`images` has 0 entries and the messages have 1 image parts"),
        ({"prompt": "a", "images": ["a.png"] * 17}, "17 images, and images.max_per_prompt allows 16"),
        ({"prompt": "a", "images": [{"bytes": "aGVsbG8="}]}, "is data that starts with b'hello', accepted are JPEG"),
        ({"prompt": "a", "images": [{"bytes": b64encode(png()).decode(), "sha256": "0" * 64}]}, "the job asks for 000"),
        ({"prompt": "a", "images": [{}]}, "neither bytes nor path, url or sha256"),
        ({"prompt": "a", "images": ["a.png"], "image": "b.png"}, "both `image` and `images`"),
        ({"prompt": 5}, "malformed row"),
        ("{", "malformed row"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: dict[str, Any] | str, words: str) -> None:
    path = jsonl(tmp_path, {"prompt": "good"}, "", row)
    with open_prompts(str(path)) as prompts:
        scan = prompts.scan()
    assert scan.total == 2
    assert scan.malformed[1].where == f"{path}:3"
    with pytest.raises(DataError, match=words):
        raise scan.malformed[1].error()


def test_the_first_reading_counts_and_tells_files_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "images": ["x.png"]}, {"prompt": "c"}]
    with open_prompts(str(jsonl(tmp_path, *rows))) as prompts:
        one = prompts.scan()
    with open_prompts(str(jsonl(tmp_path, *rows[:2], {"prompt": "d"}))) as prompts:
        other = prompts.scan()
    assert (one.total, one.with_image, one.malformed) == (3, {1}, {})
    assert one.request_types == ["text", "vlm"]
    assert Scan("", 2, one.malformed, {0, 1}).request_types == ["vlm"]
    assert one.digest != other.digest


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_the_digest_is_that_of_every_row(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"say {at}" if at != 200 else "", "image": None, "other": at} for at in range(300)]

    def digest_of(name: str, at: int, **columns: Any) -> str:
        path, changed = tmp_path / name / f"in.{kind}", [*rows[:at], {**rows[at], **columns}, *rows[at + 1 :]]
        path.parent.mkdir()
        if kind == "jsonl":
            path.write_text(
                "".join(json.dumps(row, default=lambda raw: b64encode(raw).decode()) + "\n" for row in changed)
            )
        else:
            data = datasets.Dataset.from_list(changed).cast_column("image", datasets.Image())
            data.to_parquet(path) if kind == "parquet" else data.save_to_disk(path)
        with open_prompts(str(path)) as prompts:
            scan = prompts.scan()
        assert scan.total == 300
        return scan.digest

    first = digest_of("first", 0)
    assert digest_of("elsewhere", 0) == first, "a malformed row is named by its path, which may change"
    assert digest_of("ignored", 150, other=-1) == first, "a column that isn't read"
    others = [digest_of(f"text {at}", at, prompt="another") for at in (0, 100, 150, 200, 299)]
    others += [digest_of(color, 150, image={"bytes": png(color), "path": None}) for color in ("red", "blue")]
    assert len({first, *others}) == 8


def test_standard_input_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{"prompt": "a"}\n{"prompt":\n'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    with open_prompts("-") as prompts:
        scan = prompts.scan()
        assert prompts.scan() == scan
    assert scan.malformed[1].where == "<stdin>:2"


def test_parquet_rows_are_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    rows = [{"prompt": "a", "id": 7, "prompt_token_ids": None}, {"prompt": None, "id": 8, "prompt_token_ids": [1, 2]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with open_prompts(str(path)) as prompts:
        assert [row for _, row in prompts.rows()] == [
            PromptRow(prompt="a", id=7),
            PromptRow(prompt_token_ids=(1, 2), id=8),
        ]


def test_a_missing_file_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no such file"), open_prompts("nosuch.jsonl"):
        pass
