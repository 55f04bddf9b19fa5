"""The finished output: whole or absent, and the same in JSONL and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sluice.workers.offline.answers import MINIMAL, Answer, EngineNote, write_in_order

NOTE = EngineNote(backend="hf", version="5", model="m", dtype="float32")
CUT = {"repeat_terminate": 1, "active": 1, "rule": "consecutive", "at_token": 2}
ANSWERS = [
    Answer(id="a", row=0, finish_reason="stop", text="é", token_ids=[5], logprobs=[-0.5], metadata={"k": [1]}),
    Answer(id=7, row=1, finish_reason="stop", stop_reason=9, engine=NOTE, fallback={"wanted": "vllm", "used": "hf"}),
    Answer(row=2, index=1, finish_reason="error", error="why"),
    Answer(row=3, finish_reason="repeat_terminated", token_ids=[4, 4, 0], response_mask=[1, 1, 0], triggers=CUT),
]


def test_jsonl_has_the_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [answer.line("all") for answer in ANSWERS]
    write_in_order(path, lines)
    assert path.read_bytes() == b"".join(lines)
    assert list(json.loads(ANSWERS[0].line("minimal"))) == list(MINIMAL)


def test_parquet_has_one_type_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_in_order(path, (answer.line("all") for answer in ANSWERS))
    first, second, last, cut = pq.read_table(path).to_pylist()
    assert (first["id"], first["text"], first["token_ids"], first["logprobs"]) == ("a", "é", [5], [-0.5])
    assert json.loads(first["metadata"]) == {"k": [1]}
    assert (second["id"], second["stop_reason"], second["engine"]["backend"]) == ("7", "9", "hf")
    assert second["fallback"] == {"wanted": "vllm", "used": "hf", "reason": None}
    assert (cut["triggers"], cut["response_mask"]) == (CUT, [1, 1, 0])
    assert first["triggers"] == dict.fromkeys(CUT)
    assert (last["id"], last["index"], last["error"], last["engine"]) == (None, 1, "why", None)


@pytest.mark.parametrize("count", [0, 1, 1030])
def test_parquet_of_any_length(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.parquet"
    write_in_order(path, (Answer(row=row, finish_reason="stop").line("minimal") for row in range(count)))
    table = pq.read_table(path)
    assert table.num_rows == count
    if count:
        assert table.column_names == list(MINIMAL)
        assert table["row"].to_pylist() == list(range(count))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")

    def lines() -> Iterator[bytes]:
        yield ANSWERS[0].line("all")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_in_order(path, lines())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
