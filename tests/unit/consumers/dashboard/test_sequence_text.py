"""Hostile text made visible, and filters read from addresses."""

from __future__ import annotations

import math
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.consumers.dashboard.formats import block, pretty, token_text, visible
from sluice.consumers.dashboard.sequences import address, clean, count_set, read_filter
from sluice.consumers.history.records import SequenceFilter

ANY = st.text(st.characters())


@given(ANY)
def test_nothing_hides_and_everything_can_be_sent(text: str) -> None:
    for shown in (visible(text), block(text), token_text(text), pretty({"a": text})):
        shown.encode()
        hidden = [char for char in shown if not (char.isprintable() or char.isspace())]
        assert not {"\x00", "\x1b", "\u202e", "\u2066", "\u200b", "\ufeff"} & set(shown)
        assert "\n" not in visible(text)
        assert all(ord(char) > 0x9F for char in hidden)


def test_what_was_hidden_can_be_read() -> None:
    assert visible("a\x00\u202eb\nc\td\U000e0041") == "a\\x00\\u202eb⏎c⇥d\\U000e0041"
    assert visible("x" * 50, 10) == "x" * 9 + "…"
    assert block("a\nb\x1b[0m") == "a\nb\\x1b[0m"
    assert token_text("\n") == "⏎\n"
    assert token_text("") == "·"
    assert block("ab", 1) == "a\n… (1 more characters)"


def test_what_json_cannot_say_is_shown_all_the_same() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert pretty({b"k": 1}) == "{b'k': 1}"
    assert pretty({"a": math.nan, "b": b"x"}) == '{\n  "a": NaN,\n  "b": "b\'x\'"\n}'
    assert "too deeply" in pretty(deep)


FILTERS = st.builds(
    SequenceFilter,
    search=st.text(st.characters(codec="utf-8")).map(clean),
    state=st.sampled_from(["", "dead", "handed_on"]),
    version=st.none() | st.integers(0, 10**9),
    triggered=st.none() | st.booleans(),
)


@given(FILTERS)
def test_an_address_brings_its_filter_back(wanted: SequenceFilter) -> None:
    asked = dict(parse_qsl(urlsplit(address(wanted)).query))
    assert read_filter(asked) == (wanted, "")
    assert count_set(wanted) == len(asked)


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "9" * 30, "٣"])
def test_a_version_that_is_no_number_is_left_out_and_said(version: str) -> None:
    wanted, problem = read_filter({"version": version, "search": "y" * 999})
    assert wanted.version is None
    assert "is an integer" in problem
    assert len(wanted.search) == 300
