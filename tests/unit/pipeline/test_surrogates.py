"""Halves of characters are refused with their place, wherever text comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, MessageError
from sluice.pipeline.prompts.rows import Malformed, read_rows
from sluice.pipeline.wire.codec import lone_surrogate
from sluice.pipeline.wire.messages import DecodeJob, ImageRef, SamplingParams
from sluice.producers.gateway.apis.infer import read_call
from sluice.producers.http.strict_json import decode
from sluice.producers.source import Row
from sluice.workers.offline.prompt_file import PromptRow
from sluice.workers.offline.settings import make_settings

BAD = "ab\ud800c"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (BAD, "it has a lone surrogate ('\\ud800') at character 2"),
        (["a", {"k": BAD}], "it[1].k has"),
        ({BAD: 1}, "a key of it has"),
        ((ImageRef(path=BAD),), "it[0].path has"),
        ({"a": [BAD], "b": BAD}, "it.a[0] has"),
        (["a", "é", "\U0001f600", {"k": None, "n": 1.5, "t": b"\xff"}], None),
    ],
)
def test_the_first_place_is_named(value: Any, place: str | None) -> None:
    found = lone_surrogate(value, "it")
    assert (found is None) if place is None else (found or "").startswith(place)


def test_a_nest_of_any_depth_is_looked_through() -> None:
    value: Any = BAD
    for _ in range(100_000):
        value = [value]
    assert "lone surrogate" in (lone_surrogate(value, "") or "")


def test_a_stop_string_is_refused_in_every_way_in() -> None:
    says = r"stop\[1\] has a lone surrogate \('\\ud800'\) at character 2"
    with pytest.raises(ValueError, match=says):
        SamplingParams(stop=("end", BAD))
    with pytest.raises(ConfigError, match=says.replace("stop", r"sampling\.stop.*: ")):
        load_config(None, ['sampling.stop=["end", "ab\\ud800"]'], environ={})
    with pytest.raises(ConfigError, match=says):
        make_settings(options={"stop": ("end", BAD)}, model={"path": "m"}, source="a", out="-")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": [{"role": "user", "content": BAD}]}, "messages[0].content"),
        ({"metadata": {"note": [BAD]}}, "metadata.note[0]"),
        ({"truth": BAD}, "truth"),
        ({"images": [ImageRef(url=BAD)]}, "images[0].url"),
    ],
)
def test_a_job_is_refused_before_it_is_encoded(fields: dict[str, Any], place: str) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(MessageError) as caught:
        DecodeJob(run="r", job_id="r:1", **given)
    assert str(caught.value).startswith(f"job r:1: {place} has a lone surrogate")


@pytest.mark.parametrize("kind", [Row, PromptRow])
def test_a_row_says_where_it_is_broken(tmp_path: Path, kind: Any) -> None:
    file = tmp_path / "rows.jsonl"
    good = '{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    bad = '{"messages": [{"role": "user", "content": "hi"}], "metadata": {"note": "\\ud83d"}}'
    file.write_text(f"{good}\n{bad}\n")
    first, second = read_rows(file, kind, parquet=False)
    assert not isinstance(first, Malformed)
    assert first.messages[0]["content"] == "\U0001f600"
    assert isinstance(second, Malformed)
    assert str(second.error()).startswith(f"{file}:2: malformed row: metadata.note has a lone surrogate")


def test_a_body_over_http_says_where_it_is_broken() -> None:
    with pytest.raises(ValueError, match=r"^the body\.a\[0\] has a lone surrogate"):
        decode(b'{"a": ["\\udfff"]}')
    body = b'{"infer_requests": [{"messages": [{"role": "user", "content": "\\ud800"}]}]}'
    with pytest.raises(MessageError, match=r"/infer/: the body\.infer_requests\[0\]\.messages\[0\]\.content has"):
        read_call(body)
