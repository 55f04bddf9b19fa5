"""JSON that can be read can be written again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import RequestError
from sluice.producers.http import strict_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    assert strict_json.decode(strict_json.encode(value)) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_value_error(body: bytes) -> None:
    try:
        value = strict_json.decode(body)
    except ValueError:
        return
    assert strict_json.decode(strict_json.encode(value)) == value


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b"[" * 100,
        b"9" * 5000,
        b"",
    ],
    ids=lambda body: repr(body[:10]),
)
def test_what_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.decode(body)


@pytest.mark.parametrize(
    "body", [b"[" * 300 + b"]" * 300, b"[" * 10_000, b"[" + b"1," * 1_500_000 + b"1]"], ids=["deep", "open", "many"]
)
def test_what_costs_too_much_is_refused_before_it_is_read(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"nested too deeply|more than \d+ values"):
        strict_json.decode(body)


def test_ascii_only_is_written() -> None:
    assert json.loads(strict_json.encode({"é": "🙂"})) == {"é": "🙂"}
    assert strict_json.encode("é").isascii()
