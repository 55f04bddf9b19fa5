"""What a prompt may cost, counted before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.admission import (
    BYTES_PER_TOKEN,
    MAX_CALLS,
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_VALUES,
    Limits,
    admit_json,
    admit_prompt,
    admit_request,
)

SAID = {"role": "user", "content": "a"}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


@given(plain)
def test_what_people_send_passes(value: Any) -> None:
    admit_json(json.dumps(value).encode(), "the body")


@pytest.mark.parametrize("text", ["[" * 200, '"[' * 99, "\\" * 99, '\\"' * 99, "{" * 5_000, "," * (MAX_VALUES + 1)])
def test_brackets_and_commas_of_a_text_are_text(text: str) -> None:
    admit_json(json.dumps({"a": [text] * 2}).encode(), "the body")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested too deeply"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "more than"),
        (b"[" + b"{}," * MAX_VALUES + b"{}]", "more than"),
        (b"[" + b'"",' * MAX_VALUES + b'""]', "more than"),
    ],
    ids=["lists", "objects", "numbers", "empty objects", "texts"],
)
def test_structure_is_bounded(raw: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=f"the body: {says}"):
        admit_json(raw, "the body")


@pytest.mark.parametrize(
    ("messages", "tools", "where"),
    [
        ([SAID] * (MAX_MESSAGES + 1), None, "messages"),
        ([1] * (MAX_MESSAGES + 1), None, "messages"),
        ([SAID, {"role": "user", "content": [{}] * (MAX_PARTS + 1)}], None, r"messages\.1\.content"),
        ([{**SAID, "tool_calls": [{}] * (MAX_CALLS + 1)}], None, r"messages\.0\.tool_calls"),
        ([SAID], [{}] * (MAX_TOOLS + 1), "tools"),
    ],
)
def test_lists_are_bounded(messages: Any, tools: Any, where: str) -> None:
    with pytest.raises(RequestError, match=rf"^{where}: \d+ .*(at most|the limit is)"):
        admit_prompt(messages, tools, Limits())


def test_bytes_are_bounded_by_the_context() -> None:
    limits = Limits(32_768)
    most = 32_768 * BYTES_PER_TOKEN
    admit_prompt([{"role": "user", "content": " " * (most - 100)}], None, limits)
    with pytest.raises(RequestError, match=f"32768 tokens takes at most {most}"):
        admit_prompt([{"role": "user", "content": " " * most}], None, limits)
    with pytest.raises(RequestError, match="bytes"):
        admit_prompt([SAID], [{"description": " " * most}], limits)
    with pytest.raises(RequestError, match="32768 tokens"):
        admit_request({"messages": [{"content": " " * most}]}, limits)


@pytest.mark.parametrize("malformed", [None, 1, "text", {}, [None], [1], [{"content": 1}], [{"content": [1]}]])
def test_what_is_malformed_is_left_to_its_reader(malformed: Any) -> None:
    admit_prompt(malformed, malformed, Limits())
    admit_request({"messages": malformed}, Limits())
    admit_request(malformed, Limits())


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"text_config": {"max_position_embeddings": 256}, "max_position_embeddings": 1}, 256),
        ({"max_position_embeddings": "x"}, None),
        ([], None),
    ],
)
def test_the_context_is_that_of_the_model(tmp_path: Path, config: Any, context: int | None) -> None:
    assert Limits.of_model(str(tmp_path)).context is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Limits.of_model(str(tmp_path)).context == context
