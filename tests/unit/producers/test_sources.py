"""Rows from JSONL and Parquet: what is read, and what is refused with its place."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.pipeline.config.types import DataConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.queue import job_id_for
from sluice.pipeline.wire.messages import ImageRef, SamplingParams
from sluice.producers import source
from sluice.producers.source import Malformed, Row, count_rows, fingerprint, read_rows

GOOD = {"messages": [{"role": "user", "content": "hi"}]}


def row(more: bytes) -> bytes:
    return json.dumps(GOOD).encode()[:-1] + b", " + more + b"}"


def jsonl(tmp_path: Path, *lines: bytes | dict[str, Any], **options: Any) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return DataConfig(path=str(path), **options)


def rows(config: DataConfig) -> list[Row | Malformed]:
    return list(read_rows(config))


def test_rows_come_in_file_order_with_all_their_fields(tmp_path: Path) -> None:
    full = {**GOOD, "id": 7, "truth": {"a": [1]}, "metadata": {"k": "v"}, "unknown": 1}
    config = jsonl(tmp_path, full, GOOD)
    first, second = rows(config)
    assert first == Row(messages=GOOD["messages"], id=7, truth={"a": [1]}, metadata={"k": "v"})
    assert second == Row(messages=GOOD["messages"])
    assert count_rows(config) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{nonsense", "malformed row"),
        (b'{"messages": []}', "is empty"),
        (b'{"messages": [{"role": "user"}]}', "needs a `role` string and `content`"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"truth": 1}', "messages"),
        (b'["a list"]', "malformed row"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "malformed row"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed row"),
        (b"\x00\x01", "malformed row"),
        (row(b'"metadata": {"a": [' + b"9" * 20 + b"]}"), "metadata.a[0] is an integer beyond 64 bits"),
        (row(b'"truth": -' + b"9" * 4000), "truth is an integer beyond 64 bits"),
        (row(b'"truth": {"a": "\\ud800"}'), "truth.a has a lone surrogate"),
    ],
    ids=["no json", "no message", "no content", "text", "no messages", "a list", "bad utf-8", "nested", "binary",
         "beyond 64 bits", "far beyond", "surrogate"],
)  # fmt: skip
def test_a_malformed_row_is_named_by_file_and_line_and_its_neighbours_are_read(
    tmp_path: Path, line: bytes, words: str
) -> None:
    first, bad, last = rows(jsonl(tmp_path, GOOD, line, GOOD))
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert isinstance(bad, Malformed)
    assert bad.where == f"{tmp_path / 'rows.jsonl'}:2"
    assert words in bad.problem
    assert f"{bad.where}: " in str(bad.error())


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    config = jsonl(tmp_path, b"", GOOD, b"  \t", b"x")
    good, bad = rows(config)
    assert isinstance(good, Row)
    assert isinstance(bad, Malformed)
    assert bad.where.endswith(":4")
    assert count_rows(config) == 2


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    [row] = rows(jsonl(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode()))
    assert isinstance(row, Row)


def test_an_oversize_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_ROW_BYTES", 100)
    big, good = rows(jsonl(tmp_path, {"messages": [{"role": "user", "content": "x" * 200}]}, GOOD))
    assert isinstance(big, Malformed)
    assert "at most 100" in big.problem
    assert isinstance(good, Row)


def test_the_limit_is_one_of_rows(tmp_path: Path) -> None:
    config = jsonl(tmp_path, *[GOOD] * 5, limit=3)
    assert len(rows(config)) == count_rows(config) == 3
    assert len(rows(jsonl(tmp_path, GOOD, limit=9))) == 1


@pytest.mark.parametrize(("path", "words"), [("", "not set"), ("nosuch.jsonl", "no such file"), (".", "no such file")])
def test_a_missing_file_is_a_data_error(path: str, words: str) -> None:
    for read in (rows, count_rows, fingerprint):
        with pytest.raises(DataError, match=words):
            read(DataConfig(path=path))


def test_parquet_rows_read_like_jsonl_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist(
        [
            {"messages": GOOD["messages"], "id": "a", "truth": "4"},
            {"messages": [], "id": "b", "truth": None},
            {"messages": GOOD["messages"], "id": None, "truth": None},
        ]
    )
    pq.write_table(table, path)
    config = DataConfig(path=str(path))
    first, bad, last = rows(config)
    assert first == Row(messages=GOOD["messages"], id="a", truth="4")
    assert last == Row(messages=GOOD["messages"])
    assert isinstance(bad, Malformed)
    assert bad.where == f"{path}: row 2"
    assert count_rows(config) == 3
    renamed = path.rename(tmp_path / "rows.bin")
    assert len(rows(DataConfig(path=str(renamed), format="parquet"))) == 3


def test_a_file_that_is_no_parquet_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 nonsense")
    for read in (rows, count_rows):
        with pytest.raises(DataError, match=r"rows\.parquet"):
            read(DataConfig(path=str(path)))


def parquet(path: Path) -> bytes:
    """Three row groups of 100 rows."""
    table = pa.Table.from_pylist([{**GOOD, "id": f"row-{number}", "truth": "4"} for number in range(300)])
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, compression="none", use_dictionary=False)
    return path.read_bytes()


def test_a_damaged_page_costs_its_row_group_and_every_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    raw = bytearray(parquet(path))
    raw[raw.index(b"row-150")] ^= 1
    path.write_bytes(raw)
    found = rows(DataConfig(path=str(path)))
    assert [isinstance(one, Row) for one in found] == [True] * 100 + [False] * 100 + [True] * 100
    bad = found[149]
    assert isinstance(bad, Malformed)
    assert bad.where == f"{path}: row 150"
    assert "row group 1 is damaged" in bad.problem
    assert count_rows(DataConfig(path=str(path))) == 300


def test_a_text_that_is_not_utf_8_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pa.array([b"a", b"\xff\xfe", b"c"]).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"prompt": texts, "messages": pa.array([GOOD["messages"]] * 3), "id": texts}), path)
    assert [isinstance(one, Row) for one in rows(DataConfig(path=str(path)))] == [True, False, True]


def test_whatever_changes_in_a_parquet_file_is_a_row_or_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    whole, randomly = parquet(path), random.Random(11)
    config = DataConfig(path=str(path))
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(3):
            raw[randomly.randrange(len(raw))] ^= 1 << randomly.randrange(8)
        path.write_bytes(raw[: randomly.choice((len(raw), randomly.randrange(len(raw))))])
        with contextlib.suppress(DataError):
            assert len(rows(config)) == count_rows(config)


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    first = fingerprint(jsonl(tmp_path, GOOD))
    assert fingerprint(jsonl(tmp_path, GOOD)) == first
    assert fingerprint(jsonl(tmp_path, GOOD, GOOD)) != first


def test_job_ids_depend_on_row_epoch_sampling_and_n_alone() -> None:
    base: dict[str, Any] = {"run": "r", "source_row": "a", "epoch": 0, "sampling": SamplingParams(), "n": 2}
    changes = [{"run": "s"}, {"source_row": "b"}, {"epoch": 1}, {"sampling": SamplingParams(top_p=0.5)}, {"n": 3}]
    ids = {job_id_for(**{**base, **change}) for change in changes}
    assert job_id_for(**base) == job_id_for(**base)
    assert len(ids | {job_id_for(**base)}) == 6
    assert all(one.startswith(("{r}:", "{s}:")) for one in ids)


def test_images_are_named_in_a_row_by_path_url_digest_or_all_of_them(tmp_path: Path) -> None:
    digest = "ab" * 32
    named = [
        "scans/1.png",
        "https://images.example/2.png",
        f"sha256:{digest}",
        {"url": "http://images.example/3.png", "sha256": digest},
    ]
    shown = {"messages": [{"role": "user", "content": [{"type": "image"}] * 4}]}
    plain, seen, strange = rows(jsonl(tmp_path, GOOD, {**shown, "images": named}, {**GOOD, "images": [{"file": "x"}]}))
    assert isinstance(seen, Row)
    assert seen.image_refs() == [
        ImageRef(path="scans/1.png"),
        ImageRef(url="https://images.example/2.png"),
        ImageRef(sha256=digest),
        ImageRef(url="http://images.example/3.png", sha256=digest),
    ]
    assert isinstance(plain, Row)
    assert source.identity(plain) != source.identity(seen)
    assert isinstance(strange, Malformed)
    assert "file" in strange.problem
