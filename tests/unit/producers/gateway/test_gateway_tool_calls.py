"""Tool calls in text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.pipeline.errors import ConfigError
from sluice.producers.gateway.apis.messages import MessagesRequest, blocks_of
from sluice.producers.gateway.parsers import Call, Hermes, Parsed, assistant_message, load_tool_parser, read_calls
from sluice.producers.gateway.turns import digests
from sluice.producers.http import strict_json

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


integers = st.integers(-(2**63), 2**64 - 1)
objects = st.dictionaries(st.text(max_size=5), st.one_of(integers, st.text(max_size=5), st.booleans()), max_size=3)


@given(st.lists(st.tuples(st.text("ab_", min_size=1, max_size=5), objects), max_size=4), st.text("xyz \n", max_size=8))
def test_what_was_written_as_calls_is_read_as_calls(calls: list[tuple[str, dict[str, object]]], before: str) -> None:
    blocks = [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]
    parsed = Hermes()(before + "\n".join(blocks))
    assert parsed.content == before.strip()
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


NO_CALLS = {
    "in a value": '{"name": "add", "arguments": {"a": ["\\ud800"]}}',
    "in a key": '{"name": "add", "arguments": {"\\udfff": 1}}',
    "in the name": '{"name": "add\\ud83d", "arguments": {}}',
    "deep": '{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
    "deep in a body": '{"name": "add", "arguments": {"a": ' + "[" * 196 + "]" * 196 + "}}",
    "infinite": '{"name": "add", "arguments": {"a": 1e999}}',
    "infinity": '{"name": "add", "arguments": {"a": [-Infinity]}}',
    "no number": '{"name": "add", "arguments": {"a": NaN}}',
    "too large": f'{{"name": "add", "arguments": {{"a": {2**64}}}}}',
    "too small": f'{{"name": "add", "arguments": {{"a": {-(2**63) - 1}}}}}',
    "a long name": f'{{"name": "{"a" * 257}", "arguments": {{}}}}',
}


@pytest.mark.parametrize("place", NO_CALLS)
def test_a_call_that_can_not_be_sent_and_come_back_stays_text(place: str) -> None:
    text = f"<tool_call>{NO_CALLS[place]}</tool_call>"
    assert Hermes()(text) == Parsed(text, [])
    found = Hermes()(text + ADD)
    assert (found.content, [call.name for call in found.calls]) == (text, ["add"])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", '{"a": "\ud800"}'),
        ("add", '{"a": "\\ud800"}'),
        ("add", '{"a": 1e999}'),
        ("add", '{"a": NaN}'),
        ("add", f'{{"a": {2**64}}}'),
        ("add", '{"a": ' + "[" * 196 + "]" * 196 + "}"),
        ("", "{}"),
        ("a" * 257, "{}"),
        ("\ud800", "{}"),
    ],
)
def test_so_does_one_of_a_parser_of_ones_own(name: str, arguments: str) -> None:
    assert read_calls(lambda text: Parsed("", [Call(name, arguments)]), "said") == Parsed("said")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=3))
@example({"a": float("inf")})
@example({"a": 2**64})
@example({"a": [json.loads("[" * depth + "]" * depth) for depth in (180, 190)]})
def test_a_call_comes_back_as_it_was_sent(arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments)
    for found in (
        Hermes()(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'),
        read_calls(lambda text: Parsed("", [Call("f", written)]), "said"),
    ):
        message = assistant_message(found, "k" * 32)
        said = {"role": "assistant", "content": blocks_of(message)}
        body = {"model": "default", "max_tokens": 1, "messages": [said, {"role": "user", "content": "a"}]}
        sent = MessagesRequest.model_validate(strict_json.decode(msgspec.json.encode(body)))
        assert digests(sent.conversation()[:1]) == digests([message])


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
