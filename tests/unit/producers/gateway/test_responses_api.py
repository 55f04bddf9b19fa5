"""Requests of OpenAI's responses as conversations, and answers as its items."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.wire.messages import Grammar, SamplingParams
from sluice.producers.gateway.apis.responses import ResponsesRequest, items_of
from sluice.producers.gateway.parsers import ToolChoice
from sluice.producers.gateway.refusals import Refusal

TEXT = {"type": "input_text", "text": "a"}
USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "id": "fc-1", "call_id": "c-1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c-1", "output": "2"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CHAT_CALL = {"id": "c-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "a", **fields})


def plain(*items: Any) -> list[Any]:
    return request(input=list(items)).messages()


def test_items_become_messages_of_a_chat() -> None:
    text = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    said = {"type": "message", "id": "msg-1", "role": "assistant", "status": "completed", "content": [text]}
    second = {**CALL, "call_id": "c-2"}
    assert plain(USER, said, CALL, second, OUTPUT, {"role": "developer", "content": "d"}) == [
        USER,
        {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c-2"}]},
        {"role": "tool", "tool_call_id": "c-1", "content": "2"},
        {"role": "system", "content": "d"},
    ]


def test_a_message_of_the_assistant_begins_a_turn() -> None:
    said = {"role": "assistant", "content": "b"}
    assert [one.get("content") for one in plain(USER, said, said, CALL)] == ["a", "b", "b"]
    assert plain(USER, CALL, said)[1:] == [{"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, said]


@pytest.mark.parametrize(
    "kept",
    [
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": ""},
    ],
)
def test_what_an_answer_says_comes_back_as_the_message_that_was_kept(kept: dict[str, Any]) -> None:
    assert plain(USER, *items_of(kept, "x"), USER)[1] == kept


def test_the_system_comes_first_and_is_not_kept() -> None:
    asked = request(instructions="be brief")
    assert asked.call([USER, USER]).messages == [{"role": "system", "content": "be brief"}, USER, USER, USER]
    assert (asked.leading, request().leading) == (1, 0)


def test_tools_are_functions() -> None:
    call = request(tools=[{**TOOL, "strict": True}]).call()
    assert list(call.tools) == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
    ]
    assert call.parses_tools
    assert not request(tools=[TOOL], tool_choice="none").call().parses_tools


def image(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png", **fields}]}


def test_pictures_are_parts() -> None:
    [message] = plain(image(detail="auto"))
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        (
            {"input": [{"role": "user", "content": [{**TEXT, "b": 1}]}]},
            "input.0.content.0.b",
        ),
        ({"input": [image(detail="low")]}, "input.0.content.0.detail"),
        ({"input": [{**OUTPUT, "namespace": "n"}]}, "input.0.namespace"),
        ({"input": []}, "input"),
        ({"rollout_id": " "}, "rollout_id"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_output_token": 1}, "max_output_token"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    def ask() -> None:
        asked = request(**fields)
        asked.check()
        asked.call()

    with pytest.raises(Refusal) as refused:
        ask()
    assert (refused.value.status, refused.value.path) == (400, path)


def test_formats_choices_and_efforts_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    asked = request(
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        presence_penalty=1.0,
        logit_bias={"3": 2},
    )
    asked.check()
    sampling = asked.sampling(SamplingParams())
    assert sampling.grammar == Grammar(kind="json_schema", text='{"type": "object"}')
    assert (sampling.presence_penalty, sampling.logit_bias) == (1.0, {3: 2.0})
    assert asked.call().tool_choice == ToolChoice(must=True, name="add", one=True)
    assert asked.call().template_kwargs == {"reasoning_effort": "low"}
