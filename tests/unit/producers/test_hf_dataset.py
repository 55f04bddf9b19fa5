"""Rows from Hugging Face `datasets`: the same rows as from JSONL, and what is refused with its place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import DataConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.messages import ImageRef
from sluice.producers.source import Malformed, Row, count_rows, fingerprint, read_rows

datasets = pytest.importorskip("datasets")
MESSAGES = [{"role": "user", "content": "hi"}]


def saved(directory: Path, rows: list[dict[str, Any]], **options: Any) -> DataConfig:
    datasets.Dataset.from_list(rows).save_to_disk(str(directory))
    return DataConfig(path=str(directory), **options)


def test_a_saved_data_set_reads_like_jsonl(tmp_path: Path) -> None:
    said = {"type": "text", "text": "hi"}
    shown, plain = ([{"role": "user", "content": one}] for one in ([{"type": "image", "text": None}, said], [said]))
    full = {"messages": shown, "truth": "4", "id": "a", "images": ["i.png"], "metadata": {"k": "v"}, "other": 1}
    config = saved(tmp_path / "data", [full, {"messages": plain}, {"messages": plain}], limit=2)
    first, second = read_rows(config)
    assert first == Row(messages=shown, truth="4", id="a", images=["i.png"], metadata={"k": "v"})
    assert isinstance(first, Row)
    assert first.image_refs() == [ImageRef(path="i.png")]
    assert second == Row(messages=plain)
    assert count_rows(config) == 2
    assert count_rows(DataConfig(path=config.path, format="datasets")) == 3


def test_a_prompt_is_one_user_message_and_an_answer_is_the_truth(tmp_path: Path) -> None:
    config = saved(tmp_path / "text", [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": None}])
    asked = [
        Row(messages=[{"role": "user", "content": text}], truth=truth) for text, truth in (("1+1", "2"), ("2+2", None))
    ]
    assert list(read_rows(config)) == asked
    chat = saved(tmp_path / "chat", [{"prompt": MESSAGES, "truth": "x", "answer": "y"}])
    assert list(read_rows(chat)) == [Row(messages=MESSAGES, truth="x")]


def test_a_malformed_row_is_named_by_its_number_and_its_neighbours_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": None}, {"prompt": "c"}]
    first, bad, last = read_rows(saved(tmp_path / "data", rows))
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert isinstance(bad, Malformed)
    assert bad.where == f"{tmp_path / 'data'}: row 2"
    assert "messages" in bad.problem


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    rows = [{"prompt": str(at)} for at in range(300)]
    first = fingerprint(saved(tmp_path / "a", rows))
    assert fingerprint(saved(tmp_path / "b", rows)) == first
    assert fingerprint(saved(tmp_path / "c", rows[:-1])) != first
    assert fingerprint(saved(tmp_path / "d", [*rows[:-1], {"prompt": "x"}])) != first


def test_what_is_no_data_set_says_what_to_do(tmp_path: Path) -> None:
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])})
    whole.save_to_disk(str(tmp_path / "splits"))
    other = saved(tmp_path / "other", [{"question": "a"}])
    assert count_rows(DataConfig(path=str(tmp_path / "splits/train"))) == 1
    for path, words in (
        (str(tmp_path / "splits"), "holds the splits train; name one: .*/splits/train"),
        (other.path, "neither `messages` nor `prompt`, but question"),
        (str(tmp_path / "nosuch"), "not found.*give a directory made by save_to_disk"),
        ("hf:a:b:c:d", "write hf:NAME"),
        ("hf:nobody/nothing", "if the Hub is reachable"),
    ):
        for read in (count_rows, fingerprint, lambda config: list(read_rows(config))):
            with pytest.raises(DataError, match=words):
                read(DataConfig(path=path, format="datasets"))


def test_an_image_that_is_none_costs_its_row_and_a_torn_file_is_an_error_of_the_data(tmp_path: Path) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    broken = [[{"bytes": b"no image", "path": None}]]
    data = datasets.Dataset.from_dict({"prompt": ["a"], "images": broken}, features=features)
    data.save_to_disk(str(tmp_path / "data"))
    config = DataConfig(path=str(tmp_path / "data"))
    [bad] = read_rows(config)
    assert isinstance(bad, Malformed)
    assert "accepted are" in bad.problem
    assert len(fingerprint(config)) == 24
    [arrow] = (tmp_path / "data").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-200])
    for read in (fingerprint, lambda config: list(read_rows(config))):
        with pytest.raises(DataError, match=r"data: "):
            read(config)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved(tmp_path / "data", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'datasets[<>=]"):
        count_rows(config)
