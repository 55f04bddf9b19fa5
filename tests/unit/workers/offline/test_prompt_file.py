"""Prompts: what a row may be, and what is said of one that cannot be used."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipeline.errors import DataError
from sluice.pipeline.prompts.rows import Malformed
from sluice.workers.engine.requests import TextGenerationRequest, VlmGenerationRequest
from sluice.workers.offline.prompt_file import PromptRow, Scan, open_prompts

ASKED = [{"role": "user", "content": "hi"}]


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
    absolute = request_of(jsonl(tmp_path, {"messages": ASKED, "images": ["/data/a.png"]}))
    assert (absolute.messages, absolute.images) == (ASKED, (Path("/data/a.png"),))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "exactly one of .* got none"),
        ({"prompt": "a", "messages": ASKED}, "got messages and prompt"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt_token_ids": []}, "`prompt_token_ids` is empty"),
        ({"messages": [{"role": "user"}]}, "needs a `role` string and `content`"),
        ({"prompt_token_ids": [1], "images": ["a"]}, "not `prompt_token_ids`"),
        ({"prompt": "a", "images": [{"url": "http://x/a.png"}]}, "`images` must be paths here"),
        (
            {"prompt": "a", "images": ["http://x/a.png"]},
            "`images` must be paths here; URLs and digests are only for jobs",
        ),
        ({"prompt": "a", "images": ["sha256:" + "0" * 64]}, "`images` must be paths here"),
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
