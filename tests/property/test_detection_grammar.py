"""The scanner against json.loads on well-formed text, and bounded on everything else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.tasks.detection.grammar import GRAMMARS, OBJECTS, Value, read_value, scan, string_value
from sluice.consumers.tasks.detection.parse import parse
from tests.detection_rollouts import JUNK, context, rollout
from tests.tiny_tokenizer import tiny_codec

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.text(max_size=6), st.dictionaries(st.text(max_size=6), TREES, max_size=4), max_size=5)


def naive(text: str, value: Value | None) -> Any:
    """The value that the scanner found, through json.loads of its characters."""
    assert value is not None
    if value.kind == "list":
        return [naive(text, item) for item in value.items]
    if value.kind == "object":
        return {json.loads(text[k.start : k.end]): naive(text, v) for k, v in value.members}
    return json.loads(text[value.start : value.end])


def _name(text: str, key: Value | None) -> Any:
    assert key is not None
    return json.loads(text[key.start : key.end])


@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_well_formed_text_reads_as_json_reads_it(document: Any, ascii_only: bool, indent: Any) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    found = scan(text, 100)
    assert found.closed
    assert {_name(text, member.key): naive(text, member.body) for member in found.members} == document


@given(DOCUMENTS, st.data())
def test_a_cut_keeps_exactly_the_members_that_were_complete(document: Any, data: st.DataObject) -> None:
    text = json.dumps(document)
    whole = scan(text, 100)
    cut = data.draw(st.integers(0, len(text) - 1))
    part = scan(text[:cut], 100)
    assert not part.closed
    assert part.members == tuple(member for member in whole.members if member.end <= cut)


@given(st.lists(st.dictionaries(st.text(max_size=6), TREES, max_size=4), max_size=5), JUNK, st.data())
def test_a_list_of_objects_reads_as_json_reads_it_and_a_cut_keeps_what_was_complete(
    entries: Any, junk: str, data: st.DataObject
) -> None:
    indent = data.draw(st.sampled_from([None, 1, "\t"]))
    text = junk + json.dumps({"objects": entries}, indent=indent) + data.draw(st.sampled_from(["", "\n```", "}"]))
    found = scan(text, 100, OBJECTS)
    assert (found.closed, found.start) == (True, len(junk))
    assert [naive(text, member.body) for member in found.members] == entries
    cut = data.draw(st.integers(0, len(text)))
    part = scan(text[:cut], 100, OBJECTS)
    assert part.members == tuple(member for member in found.members if member.end <= cut)


@given(st.text(alphabet='{}[]",:\\ab1 -', max_size=60), st.integers(0, 60))
def test_any_text_ends_in_a_value_or_in_none(text: str, at: int) -> None:
    value = read_value(text, at, len(text), 8)
    assert value is None or at < value.end <= len(text)
    for grammar in GRAMMARS.values():
        assert all(member.end <= len(text) for member in scan(text, 10, grammar).members)


@given(st.text(max_size=20))
@settings(max_examples=300)
def test_a_string_means_what_json_says(text: str) -> None:
    literal = json.dumps(text)
    assert string_value(literal, Value("string", 0, len(literal))) == text


BOUND_S = 30.0  # of the processor, whatever else runs; in linear time they take one at most
HOSTILE = {
    "deep_objects": '{"object_1": ' + '{"a":' * 50_000,
    "deep_lists": '{"object_1": {"desc": "a", "bbox_2d": ' + "[" * 50_000 + "]" * 50_000 + "}}",
    "huge_number": '{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, ' + "9" * 5000 + "]}}",
    "exponent": '{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 1e999999999]}}',
    "nan": '{"object_1": {"desc": "a", "bbox_2d": [NaN, Infinity, -Infinity, 4]}}',
    "lone_surrogate": '{"object_1": {"desc": "\\ud800", "bbox_2d": [1, 2, 3, 4]}}',
    "many_quotes": '{"object_1": {"desc": ' + '"' * 60_000,
    "many_escapes": '{"object_1": {"desc": "' + "\\" * 60_001,
    "many_members": '{"object_1": {' + ", ".join(f'"k{i}": 1' for i in range(20_000)) + "}}",
    "long_list": '{"object_1": {"desc": "a", "bbox_2d": [' + "1, " * 30_000 + "1]}}",
    "many_objects": "{" + '"object_1": {}, ' * 20_000,
    "long_index": '{"object_' + "9" * 6000 + '": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}}',
    "spaces": '{"object_1"' + " " * 90_000,
}


HOSTILE_LISTS = {name: text.replace('{"object_1": ', '{"objects": [', 1) for name, text in HOSTILE.items()} | {
    "many_openings": '{"objects": ' * 9000,
    "many_lists": '{"objects": [' * 9000,
    "braces_and_spaces": ("{" + " " * 300) * 300,
    "many_points": '{"objects": [{"desc": "a", "poly": [' + "1, " * 20_000 + "1]}",
    "deep_points": '{"objects": [{"desc": "a", "poly": ' + "[" * 40_000,
}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        *(pytest.param("object_n", text, id=f"object_n-{name}") for name, text in HOSTILE.items()),
        *(pytest.param("objects", text, id=f"objects-{name}") for name, text in HOSTILE_LISTS.items()),
    ],
)
def test_hostile_text_costs_bounded_time_and_drops_everything(grammar: str, text: str) -> None:
    codec = tiny_codec()
    ids = codec.encode(text)
    started = time.process_time()
    parsed = parse(rollout(ids), context(codec, grammar=grammar))
    assert time.process_time() - started < BOUND_S
    assert not parsed.valid
    assert parsed.prefix_len == 0


def test_an_empty_list_that_prose_quotes_is_not_the_answer() -> None:
    prose = '{"objects": []} stands for none. '
    found = scan(prose + '{"objects": [{"desc": "a"}]}', 10, GRAMMARS["objects"])
    assert (len(found.members), found.closed, found.start) == (1, True, len(prose))
    nothing = scan(prose, 10, GRAMMARS["objects"])
    assert (nothing.members, nothing.closed, nothing.start) == ((), True, 0)


def test_a_list_that_is_too_long_is_cut_and_flagged() -> None:
    one = '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}'
    text = "{" + ", ".join(f'"object_{n}": {one}' for n in range(1, 9)) + "}"
    codec = tiny_codec()
    value = parse(rollout(codec.encode(text)), context(codec, max_objects=3)).value
    assert len(value.valid) == 3
    assert value.truncated
    assert value.next_index == 4
