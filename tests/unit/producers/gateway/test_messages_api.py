"""Anthropic's requests as conversations, and answers as its messages."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.wire.messages import MAX_LISTED, MAX_STOP, Grammar, SamplingParams
from sluice.producers.gateway.answers import Answer
from sluice.producers.gateway.apis.messages import CountRequest, MessagesAnswer, MessagesRequest, blocks_of, problem
from sluice.producers.gateway.parsers import ToolChoice
from sluice.producers.gateway.refusals import Refusal
from tests.factories import sequence_result

USER = {"role": "user", "content": "a"}
TEXT = {"type": "text", "text": "b"}
USE = {"type": "tool_use", "id": "c-1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c-1", "content": "2"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "default", "max_tokens": 4, "messages": [USER], **fields})


def plain(*messages: Any, **fields: Any) -> list[Any]:
    return request(messages=list(messages), **fields).conversation()


def test_a_call_and_its_result_become_messages_of_a_chat() -> None:
    said = {"role": "assistant", "content": [TEXT, USE]}
    told = {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "c-2", "is_error": True}, TEXT]}
    call = {"id": "c-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert plain(USER, said, told, system=[TEXT, {**TEXT, "cache_control": {"type": "ephemeral"}}]) == [
        {"role": "system", "content": "bb"},
        USER,
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c-1", "content": "2"},
        {"role": "tool", "tool_call_id": "c-2", "content": "2", "is_error": True},
        {"role": "user", "content": "b"},
    ]


def test_the_order_of_texts_and_results_is_kept() -> None:
    mixed = {"role": "user", "content": [TEXT, RESULT, TEXT]}
    assert [one["role"] for one in plain(USER, {"role": "assistant", "content": [USE]}, mixed)[2:]] == [
        "user",
        "tool",
        "user",
    ]


def test_pictures_are_parts() -> None:
    base64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    url = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    [message] = plain({"role": "user", "content": [base64, url, TEXT]})
    assert [part.get("image_url", {}).get("url") for part in message["content"]] == [
        "data:image/png;base64,aGk=",
        "https://a/b.png",
        None,
    ]


def test_what_an_answer_says_comes_back_as_the_message_that_was_kept() -> None:
    call = {"id": "c-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for kept in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": ""},
    ):
        assert plain(USER, {"role": "assistant", "content": blocks_of(kept)}, USER)[1] == kept


@pytest.mark.parametrize("texts", [["a"] * (MAX_LISTED + 1), ["a", ""], ["a" * (MAX_STOP + 1)]])
def test_ends_that_are_refused_are_named_as_they_were_sent(texts: list[str]) -> None:
    with pytest.raises(Refusal, match="stop_sequences: ") as refused:
        request(stop_sequences=texts).sampling(SamplingParams())
    assert (refused.value.status, refused.value.path) == (400, "stop_sequences")


def test_tools_are_functions() -> None:
    call = request(tools=[{**TOOL, "description": "sum", "type": "custom"}], tool_choice={"type": "auto"}).call()
    function = {"name": "add", "parameters": {"type": "object"}, "description": "sum"}
    assert list(call.tools) == [{"type": "function", "function": function}]
    assert call.parses_tools
    assert not request(tools=[TOOL], tool_choice={"type": "none"}).call().parses_tools


THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}]}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "gone"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"else": 1}}, "output_config.else"),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.json_schema"),
        ({"tool_choice": {"type": "auto", "else": 1}}, "tool_choice.else"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**TOOL, "else": 1}]}, "tools.0.else"),
        ({"messages": [USER, THOUGHT, USER]}, "messages.1.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": [{**TEXT, "else": 1}]}]}, "messages.0.content.0.else"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages.1.content.0.type"),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "messages.1.role"),
        ({"messages": [{**USER, "name": "x"}]}, "messages.0.name"),
        ({"system": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}, "system.0.source.type"),
        ({"rollout_id": " "}, "rollout_id"),
        ({"max_token": 4}, "max_token"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        request(**fields).call()
    assert (refused.value.status, refused.value.path) == (400, path)


def test_a_count_has_the_same_rules() -> None:
    with pytest.raises(Refusal, match="thinking"):
        CountRequest.model_validate({"model": "a", "messages": [USER], "thinking": {"type": "adaptive"}}).check()


def test_errors_are_told_in_their_kinds() -> None:
    kinds = {status: problem(status, "a")["error"]["type"] for status in (400, 401, 404, 413, 422, 429, 500, 503, 504)}
    assert kinds == {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        422: "invalid_request_error",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }


def test_formats_choices_and_efforts_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    asked = request(
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert asked.sampling(SamplingParams()).grammar == Grammar(kind="json_schema", text='{"type": "object"}')
    assert asked.call().tool_choice == ToolChoice(must=True, one=True)
    assert asked.call().template_kwargs == {"reasoning_effort": "low"}
    named = request(tools=[TOOL], tool_choice={"type": "tool", "name": "add"}).call().tool_choice
    assert named == ToolChoice(must=True, name="add", one=True)
    first = request(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).call().tool_choice
    assert first == ToolChoice(one=True)


def test_tokens_of_a_kept_prefix_are_counted_apart() -> None:
    answer = Answer("m", [sequence_result("job", cached_tokens=1)], [{"role": "assistant", "content": "b"}])
    no_stream: Any = None
    assert MessagesAnswer(request(), SamplingParams(), no_stream).whole(answer)["usage"] == {
        "input_tokens": 1,
        "cache_read_input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }
