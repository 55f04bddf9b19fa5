"""Which turn a list of messages goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.producers.gateway.turns import Found, digests, goes_on_from, normal

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def calling(arguments: str) -> dict[str, Any]:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages_of = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, roles, st.sampled_from("abc")))


@dataclass
class Known:
    history: str


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": [], "tool_calls": [], "refusal": None}),
        ({"role": "user", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}),
        (calling('{"a": 60.0, "b": [-0.0, 9007199254740993]}'), calling('{"a": 60, "b": [0, 9007199254740992]}')),
        (calling('{"a": 1e400, "b": true}'), calling('{"b": true, "a": 1e400}')),
        ({"role": "tool", "content": "a", "is_error": False}, {"role": "tool", "content": "a"}),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}],
                "audio": None,
                "annotations": [],
            },
        ),
    ],
)
def test_what_clients_change_on_the_way_is_the_same_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests([one]) == digests([other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}),
        ({"role": "user", "content": "a", "name": "x"}, {"role": "user", "content": "a"}),
        ({"role": "tool", "content": "a", "is_error": True}, {"role": "tool", "content": "a"}),
        (calling('{"a": 1}'), calling('{"a": true}')),
        (calling('{"a": 1}'), calling('{"a": "1"}')),
    ],
)
def test_what_means_something_else_is_another_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests([one]) != digests([other])


def test_arguments_that_are_no_json_are_compared_as_they_are() -> None:
    broken = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]}
    assert normal(broken)["tool_calls"] == [["c1", "add", "{"]]


@given(messages=messages_of, known=st.lists(messages_of, max_size=6))
def test_the_longest_known_history_that_ends_in_an_answer_is_found(
    messages: list[dict[str, Any]], known: list[list[dict[str, Any]]]
) -> None:
    turns = [Known(digests(history)[-1]) for history in known]
    found = goes_on_from(turns, messages, digests(messages))
    fits = [
        (len(history), place)
        for place, history in enumerate(known)
        if history and history[-1]["role"] == "assistant" and messages[: len(history)] == history
    ]
    assert found == (Found(max(fits)[1], max(fits)[0] - 1) if fits else None)


def test_other_tools_are_another_history() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [Known(digests(history, [{"name": "x"}])[-1])]
    assert goes_on_from(turns, history, digests(history, [{"name": "x"}])) == Found(0, 1)
    assert goes_on_from(turns, history, digests(history)) is None
