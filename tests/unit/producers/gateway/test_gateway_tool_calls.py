"""Tool calls in text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import ConfigError
from sluice.producers.gateway.parsers import Call, Hermes, Parsed, assistant_message, load_tool_parser, read_calls

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("plain", "plain", []),
        (f"I add. {ADD}", "I add.", ["add"]),
        (f"{ADD}\n{ADD}", "", ["add", "add"]),
        (f"a {ADD} b", "a\nb", ["add"]),
        ('<tool_call>{"name": "add", "arguments": {}}', "", ["add"]),  # cut before the end mark
        ('<tool_call>{"name": "add"}</tool_call>', "", ["add"]),
        ('x <tool_call>{"name": "add", "argu', 'x <tool_call>{"name": "add", "argu', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": 3}', '<tool_call>{"name": "a", "arguments": 3}', []),
        (f"<tool_call>{{</tool_call>{ADD}", "<tool_call>{</tool_call>", ["add"]),
    ],
)
def test_well_formed_calls_are_calls_and_all_else_is_content(text: str, content: str, names: list[str]) -> None:
    parsed = Hermes()(text)
    assert (parsed.content, [call.name for call in parsed.calls]) == (content, names)


objects = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5), st.booleans()), max_size=3)


@given(st.lists(st.tuples(st.text("ab_", min_size=1, max_size=5), objects), max_size=4), st.text("xyz \n", max_size=8))
def test_what_was_written_as_calls_is_read_as_calls(calls: list[tuple[str, dict[str, object]]], before: str) -> None:
    blocks = [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]
    parsed = Hermes()(before + "\n".join(blocks))
    assert parsed.content == before.strip()
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


HALVES = {
    "in a value": '{"name": "add", "arguments": {"a": ["\\ud800"]}}',
    "in a key": '{"name": "add", "arguments": {"\\udfff": 1}}',
    "in the name": '{"name": "add\\ud83d", "arguments": {}}',
    "deep": '{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
}


@pytest.mark.parametrize("place", HALVES)
def test_a_call_that_no_json_could_carry_stays_text(place: str) -> None:
    text = f"<tool_call>{HALVES[place]}</tool_call>"
    assert Hermes()(text) == Parsed(text, [])
    found = Hermes()(text + ADD)
    assert (found.content, [call.name for call in found.calls]) == (text, ["add"])


def test_so_does_one_of_a_parser_of_ones_own() -> None:
    def careless(text: str) -> Parsed:
        return Parsed("", [Call("add", '{"a": "\ud800"}')])

    assert read_calls(careless, "said") == Parsed("said")


def test_ids_are_the_same_for_the_same_turn() -> None:
    parsed = Parsed("", [Call("add", "{}"), Call("add", "{}")])
    message = assistant_message(parsed, "k" * 32)
    assert message == assistant_message(parsed, "k" * 32)
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["content"] is None


@pytest.mark.parametrize("name", ["nothing", "no.such.module:x", "json:no_such", "json:__name__"])
def test_a_parser_that_cannot_be_had_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tool_parser"):
        load_tool_parser(name)


def test_a_parser_of_ones_own_is_taken_by_its_path() -> None:
    assert load_tool_parser("json:loads") is json.loads


def test_the_calls_of_every_choice_have_ids_of_their_own() -> None:
    messages = [assistant_message(Parsed("", [Call("f", "{}")] * 2), "a" * 24 + f"{index:x}") for index in range(3)]
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 6
