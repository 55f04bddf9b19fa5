"""Hostile text made visible, and filters read from addresses."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.consumers.dashboard.render import block, pretty, token_text, visible
from sluice.consumers.dashboard.sequences import Asked, clean, plain, truth_text
from sluice.consumers.history.index import SORTS
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


RANGES = st.dictionaries(
    st.sampled_from(["reward", "length"]), st.tuples(st.integers(-9, 9).map(float), st.none() | st.just(9.0))
)


@given(FILTERS, st.text(st.characters(codec="utf-8")).map(clean), st.sampled_from(sorted(SORTS)), RANGES)
def test_an_address_brings_its_question_back(wanted: SequenceFilter, text: str, sort: str, ranges: Any) -> None:
    asked = Asked(wanted, text, sort, ranges)
    assert Asked.read(dict(parse_qsl(urlsplit(asked.address()).query))) == asked


@pytest.mark.parametrize("bound", ["x", "nan", "inf", "1e999", "--1", "9" * 50])
def test_a_bound_that_is_no_number_is_left_out_and_said(bound: str) -> None:
    asked = Asked.read({"reward_min": bound, "reward_max": "1"})
    assert (asked.ranges, "is a number" in asked.problem) == ({"reward": (None, 1.0)}, True)


def test_a_prompt_is_shown_without_its_template_and_a_truth_in_a_line() -> None:
    assert plain("<|im_start|>user\nWhat is 3 + 3?<|im_end|>\n<|im_start|>assistant\n") == "What is 3 + 3?"
    pads = "<|vision_start|><|image_pad|>…<|vision_end|>"
    assert plain(f"<|im_start|>user\n{pads}{pads}Name it.<|im_end|>\n") == "[picture] Name it."
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    truths = [None, "six", [{"desc": "ä"}], {b"k": 1}, deep]
    assert [truth_text(truth) for truth in truths[:3]] == ["", "six", '[{"desc": "ä"}]']
    assert {truth_text(truth) for truth in truths[3:]} == {"(cannot be shown in a line)"}


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "9" * 30, "٣"])
def test_a_version_that_is_no_number_is_left_out_and_said(version: str) -> None:
    asked = Asked.read({"version": version, "search": "y" * 999})
    assert asked.wanted.version is None
    assert "is an integer" in asked.problem
    assert len(asked.wanted.search) == 300
