"""Every row of the protocol's table: defaults, bounds, and the path of a complaint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from sluice.producers.http import strict_json
from sluice.producers.http.schemas import (
    MAX_TOKENS_LIMIT,
    VALID_MESSAGE_ROLES,
    CompletionsRequest,
    CompletionsResponse,
    Message,
    RolloutMetrics,
    RolloutRequest,
    RolloutResponse,
    RolloutStatus,
    SamplingParams,
    ToolCall,
)

REQUEST = {
    "rollout_id": "r",
    "server_url": "http://127.0.0.1:8081",
    "messages": [{"role": "user", "content": "hi"}],
    "tokenizer_name": "policy",
}
ASK = {"messages": REQUEST["messages"], "rollout_id": "r"}
CALL = {"id": "c", "function": {"name": "add", "arguments": "{}"}}
REPLY = {
    "choices": [{"message": {"role": "assistant", "content": "x"}}],
    "token_ids": [1, 2],
    "logprobs": [-1, -0.5],
    "prompt_token_ids": [3],
}


def complaint(schema: type[BaseModel], value: Any) -> str:
    """The path of the first complaint."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(value)
    return strict_json.what_is_wrong(caught.value)[0]


def test_the_defaults() -> None:
    assert SamplingParams().model_dump() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 512,
        "stop": None,
        "logprobs": True,
    }
    request = RolloutRequest.model_validate(REQUEST)
    assert request.sampling_params == SamplingParams()
    assert (request.tokenizer_revision, request.tool_server_url, request.callback_api_key) == (None, None, None)
    assert (request.max_turns, request.max_tokens_total, request.metadata) == (10, 8192, {})
    assert set(RolloutMetrics().model_dump().values()) == {0}
    answer = RolloutResponse(rollout_id="r", status=RolloutStatus.COMPLETED)
    assert (answer.final_messages, answer.finish_reason, answer.error_message, answer.extra_fields) == (
        [],
        None,
        None,
        {},
    )
    call = CompletionsRequest.model_validate(ASK)
    assert (call.model, call.response_mask, call.tools) == ("default", None, None)
    assert ToolCall.model_validate(CALL).type == "function"


BOUNDS = [
    (SamplingParams, {}, "temperature", [0, 0.5, 2], [-0.1, 2.1, math.nan, math.inf, "1", None, True, 10**400]),
    (SamplingParams, {}, "top_p", [0, 1], [-0.1, 1.1, math.nan, "1"]),
    (SamplingParams, {}, "max_tokens", [1, MAX_TOKENS_LIMIT], [0, MAX_TOKENS_LIMIT + 1, 1.5, "1", True]),
    (SamplingParams, {}, "stop", [None, [], ["a", "b"]], ["a", [1]]),
    (SamplingParams, {}, "logprobs", [True, False], ["yes", 1, None]),
    (RolloutRequest, REQUEST, "rollout_id", ["x", "x" * 256, "a/b"], ["", " ", "\n\t", "x" * 257, 1, None]),
    (RolloutRequest, REQUEST, "messages", [[{"role": "tool"}]], [[], None, "hi", {}]),
    (RolloutRequest, REQUEST, "tokenizer_name", ["t"], ["", None, 1]),
    (RolloutRequest, REQUEST, "tokenizer_revision", [None, "main"], [1]),
    (RolloutRequest, REQUEST, "max_turns", [1, 100], [0, 101, None, "3"]),
    (RolloutRequest, REQUEST, "max_tokens_total", [1, 1_000_000], [0, 1_000_001]),
    (RolloutRequest, REQUEST, "callback_api_key", [None, "sk-1"], ["", " a", "a\nb", "é", 1]),
    (RolloutRequest, REQUEST, "metadata", [{}, {"a": ["x" * 1_000_000]}], [None, [], {"a": "x" * 2**20}]),
    (RolloutRequest, REQUEST, "metadata", [{"max_user_turns": None}], [{"max_user_turns": 0}, {"max_user_turns": "3"}]),
    (Message, {"role": "user"}, "role", VALID_MESSAGE_ROLES, ["robot", "", None, 1]),
    (Message, {"role": "user"}, "content", ["", "x", None, [], [{"type": "text", "text": "x"}]], [1, {}, ["x"]]),
    (Message, {"role": "user"}, "tool_call_id", [None, "x" * 256], ["x" * 257, 1]),
    (Message, {"role": "user"}, "tool_calls", [None, [], [CALL]], [CALL, "x"]),
    (ToolCall, CALL, "id", ["x", "x" * 256], ["", "x" * 257, None]),
    (ToolCall, CALL, "type", ["function"], ["code", None]),
    (CompletionsRequest, ASK, "response_mask", [None, [0, 1]], ["01"]),
    (CompletionsResponse, REPLY, "token_ids", [[0, 2**31 - 1]], [None, "12"]),
    (CompletionsResponse, REPLY, "prompt_token_ids", [[0]], [[], None]),
]


@pytest.mark.parametrize(("schema", "base", "field", "good", "bad"), BOUNDS, ids=lambda value: str(value)[:30])
def test_the_bounds(schema: type[BaseModel], base: Any, field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(schema.model_validate({**base, field: value}), field, "none") != "none"
    for value in bad:
        assert complaint(schema, {**base, field: value}).split(".")[0] == field, value


@pytest.mark.parametrize(
    ("schema", "value", "path"),
    [
        (RolloutRequest, {**REQUEST, "messages": [{"role": "user"}, {"role": "x"}]}, "messages.1.role"),
        (RolloutRequest, {**REQUEST, "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        (Message, {"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}, "tool_calls.0.id"),
        (ToolCall, {**CALL, "function": {"name": "", "arguments": {}}}, "function.name"),
        (ToolCall, {**CALL, "function": {"name": "x" * 257, "arguments": {}}}, "function.name"),
        (ToolCall, {**CALL, "function": {"name": "x"}}, "function.arguments"),
        (
            CompletionsRequest,
            {"messages": REQUEST["messages"], "rollout_id": "r", "response_mask": [0, 2]},
            "response_mask.1",
        ),
        (CompletionsResponse, {**REPLY, "token_ids": [-1, 2]}, "token_ids.0"),
        (CompletionsResponse, {**REPLY, "token_ids": [1, True]}, "token_ids.1"),
        (CompletionsResponse, {**REPLY, "logprobs": [0, math.nan]}, "logprobs.1"),
        (CompletionsResponse, {**REPLY, "logprobs": [0]}, ""),
        (CompletionsResponse, {**REPLY, "choices": []}, "choices"),
    ],
)
def test_the_path_of_a_complaint(schema: type[BaseModel], value: Any, path: str) -> None:
    assert complaint(schema, value) == path


@pytest.mark.parametrize("field", ["rollout_id", "server_url", "messages", "tokenizer_name"])
def test_what_a_request_must_have(field: str) -> None:
    assert complaint(RolloutRequest, {key: value for key, value in REQUEST.items() if key != field}) == field


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "prompt_token_ids", "choices"])
def test_what_a_reply_must_have(field: str) -> None:
    assert complaint(CompletionsResponse, {key: value for key, value in REPLY.items() if key != field}) == field


@pytest.mark.parametrize("field", ["server_url", "tool_server_url"])
def test_urls(field: str) -> None:
    for given, kept in (
        ("http://h:1/", "http://h:1"),
        ("https://h/a//", "https://h/a"),
        ("http://[::1]:9", "http://[::1]:9"),
    ):
        assert getattr(RolloutRequest.model_validate({**REQUEST, field: given}), field) == kept
    for bad in (
        "ftp://h",
        "h:1",
        "",
        "http://",
        "//h",
        "http://u:p@h",
        "http://h?a=1",
        "http://h#f",
        "http://h:99999",
        1,
    ):
        assert complaint(RolloutRequest, {**REQUEST, field: bad}) == field


def test_unknown_fields_of_a_message_are_kept_and_absent_ones_stay_absent() -> None:
    call = {**CALL, "index": 0, "function": {**CALL["function"], "arguments": {"a": [1, {"b": None}]}}}
    message = {"role": "assistant", "content": None, "reasoning": "…", "tool_calls": [call]}
    assert Message.model_validate(message).plain() == message


def test_the_hints_bound_the_turns() -> None:
    def limits(**fields: Any) -> tuple[int, int]:
        return RolloutRequest.model_validate(REQUEST | fields).turn_limits()

    assert limits() == (10, 10)
    assert limits(metadata={"max_assistant_turns": 3, "max_user_turns": 2}) == (3, 2)
    assert limits(max_turns=2, metadata={"max_assistant_turns": 30, "max_user_turns": None}) == (2, 2)


def test_the_key_is_in_no_repr_and_no_dump() -> None:
    request = RolloutRequest.model_validate({**REQUEST, "callback_api_key": "sk-secret"})
    assert "sk-secret" not in repr(request) + str(request) + request.model_dump_json()
    with pytest.raises(ValidationError) as caught:
        RolloutRequest.model_validate({**REQUEST, "callback_api_key": "sk-secret\n"})
    assert "sk-secret" not in str(caught.value) + repr(caught.value)
