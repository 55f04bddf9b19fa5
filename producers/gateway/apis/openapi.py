"""What the OpenAPI document contains besides the types: examples, answers that aren't JSON objects, errors."""

from __future__ import annotations

from typing import Any

from fastapi.openapi.models import Example
from pydantic import Field

from sluice.pipeline.http.errors import documented
from sluice.producers.http.schemas import CompletionsResponse

_JSON = "application/json"
# Without a schema: before OpenAPI 3.2, readers disagree whether it is the whole stream's or each event's.
_STREAM = "text/event-stream"
_ASKED = {"role": "user", "content": "What is 15 times 23?"}
_CALL = {
    "id": "call_9f2c_0",
    "type": "function",
    "function": {"name": "multiply", "arguments": '{"a": 15, "b": 23}'},
}
_NUMBER = {"type": "number"}
_MULTIPLY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two numbers.",
        "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
    },
}

_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

CHAT_EXAMPLES: dict[str, Example] = {
    "completion": {"summary": "A completion.", "value": {"messages": [_ASKED], "max_tokens": 256}},
    "image": {
        "summary": "A question about an image: a data URL, or the URL of a host in images.hosts.",
        "value": {"messages": [{"role": "user", "content": [_PICTURE, {"type": "text", "text": "What is it?"}]}]},
    },
    "turn": {
        "summary": "The second turn of a rollout: the first call's messages, its answer, and the tool's result.",
        "value": {
            "rollout_id": "r-1",
            "messages": [
                _ASKED,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": _CALL["id"], "content": "345"},
            ],
            "tools": [_MULTIPLY],
        },
    },
}

_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "345"},
    "finish_reason": "stop",
    "logprobs": None,
    "token_ids": [45, 8],
    "repeat_terminate_triggered": 0,
}
_COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-r-1",
    "object": "chat.completion",
    "created": 1795200000,
    "model": "default",
    "system_fingerprint": "v3",
    "choices": [_CHOICE],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
    "prompt_token_ids": [11, 27, 30, 9],
    "token_ids": [45, 8],
    "logprobs": [-0.02, -0.11],
}
_ROLLOUT = {"id": "r-1", "turn": 1, "parent": 0, "resynced": False}
_EVENTS = """\
data: {"id":"chatcmpl-9f2c",…,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

data: {…,"choices":[{"index":0,"delta":{"content":"345"},"finish_reason":null}]}

data: {…,"choices":[{"index":0,"delta":{},"finish_reason":"stop",…}],"prompt_token_ids":[…],"token_ids":[…],…}

data: [DONE]
"""


class ChatResponse(CompletionsResponse):
    """As a turn's, which has logprobs; a call outside a rollout has them where it asks for them."""

    logprobs: list[float] | None = Field(  # type: ignore[assignment]
        description="One per token of `token_ids`: natural logarithms; null: not asked for."
    )


CHAT: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ChatResponse,
        "description": (
            "The answer; `rollout` is there with a `rollout_id`. With `stream` it is sent as events: texts, tool "
            "calls, then the ending with all ids, and `[DONE]`. A failure during the stream is an event with `error`, "
            "without `[DONE]`."
        ),
        "content": {
            _JSON: {"example": {**_COMPLETION, "rollout": _ROLLOUT}},
            _STREAM: {"example": _EVENTS},
        },
    }
}


COMPLETION_EXAMPLES: dict[str, Example] = {
    "text": {"summary": "A text.", "value": {"prompt": "15 times 23 is", "max_tokens": 8}},
    "tokens": {
        "summary": "Token ids, with those of the answer and their log-probabilities.",
        "value": {"prompt": [11, 27, 30, 9], "max_tokens": 8, "logprobs": 0, "return_token_ids": True},
    },
}

_TOOL = {
    "name": "multiply",
    "description": "The product of two numbers.",
    "input_schema": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
}
_USED = {"type": "tool_use", "id": "call_9f2c_0", "name": "multiply", "input": {"a": 15, "b": 23}}

MESSAGES_EXAMPLES: dict[str, Example] = {
    "message": {"summary": "A message.", "value": {"model": "default", "max_tokens": 256, "messages": [_ASKED]}},
    "turn": {
        "summary": "The second turn of a rollout: the first call's messages, its answer, and the tool's result.",
        "value": {
            "model": "default",
            "max_tokens": 256,
            "rollout_id": "r-1",
            "messages": [
                _ASKED,
                {"role": "assistant", "content": [_USED]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "call_9f2c_0", "content": "345"}],
                },
            ],
            "tools": [_TOOL],
        },
    },
}

GENERATE_EXAMPLES: dict[str, Example] = {
    "tokens": {
        "summary": "Token ids and their log-probabilities.",
        "value": {"token_ids": [11, 27, 30, 9], "sampling_params": {"max_tokens": 8, "logprobs": 1}},
    },
    "turn": {
        "summary": "The second turn of a rollout: the first call's prompt, its answer, and more tokens.",
        "value": {"rollout_id": "r-1", "token_ids": [11, 27, 30, 9, 45, 8, 12, 31]},
    },
}

_OBJECT = {"type": "object"}


def _answer_of(description: str, whole: dict[str, Any], events: str) -> dict[int | str, dict[str, Any]]:
    content = {_JSON: {"schema": _OBJECT, "example": whole}, _STREAM: {"example": events}}
    return {200: {"description": description, "content": content}}


RESPONSES_EXAMPLES: dict[str, Example] = {
    "response": {"summary": "A response.", "value": {"input": _ASKED["content"], "max_output_tokens": 256}},
    "tool": {
        "summary": "What a tool answered; the conversation is the stored one.",
        "value": {
            "previous_response_id": "resp_9f2c",
            "input": [{"type": "function_call_output", "call_id": "call_9f2c_0", "output": "345"}],
            "tools": [{"type": "function", **_MULTIPLY["function"]}],
        },
    },
}

RESPONSES = _answer_of(
    "OpenAI's response, with the token ids of the prompt and the answer. With `stream` it is sent as OpenAI's events; "
    "the last one has the whole response.",
    {
        "id": "resp_9f2c",
        "object": "response",
        "created_at": 1795200000,
        "status": "completed",
        "model": "default",
        "output": [
            {
                "type": "message",
                "id": "msg_9f2c",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "345", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6},
        "system_fingerprint": "v3",
        "prompt_token_ids": [11, 27, 30, 9],
        "token_ids": [45, 8],
        "logprobs": [-0.02, -0.11],
    },
    'event: response.created\ndata: {"type":"response.created",…}\n\n…\n\n'
    'event: response.completed\ndata: {"type":"response.completed","response":{…}}\n',
)

MESSAGES = _answer_of(
    "Anthropic's message, with the token ids of the prompt and the answer. With `stream` it is sent as Anthropic's "
    "events; `message_delta` has our own fields.",
    {
        "id": "msg_9f2c",
        "type": "message",
        "role": "assistant",
        "model": "default",
        "content": [{"type": "text", "text": "345"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 2},
        "system_fingerprint": "v3",
        "prompt_token_ids": [11, 27, 30, 9],
        "token_ids": [45, 8],
        "logprobs": [-0.02, -0.11],
    },
    'event: message_start\ndata: {"type":"message_start","message":{…}}\n\n…\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n',
)

COMPLETIONS = _answer_of(
    "A choice for each answer of each prompt, in order. With `stream` it is sent as events, and `[DONE]`.",
    {
        "id": "cmpl-9f2c",
        "object": "text_completion",
        "created": 1795200000,
        "model": "default",
        "system_fingerprint": "v3",
        "choices": [
            {
                "index": 0,
                "text": " 345",
                "logprobs": {
                    "tokens": [" 345"],
                    "token_logprobs": [-0.02],
                    "top_logprobs": [{" 345": -0.02}],
                    "text_offset": [0],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "repeat_terminate_triggered": 0,
                "prompt_token_ids": [11, 27, 30, 9],
                "token_ids": [45],
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    },
    'data: {"id":"cmpl-9f2c",…,"choices":[{"index":0,"text":" 345","finish_reason":null}]}\n\ndata: [DONE]\n',
)

_ENTRY = {"token": "token_id:45", "token_id": 45, "logprob": -0.02, "bytes": None, "rank": None}

GENERATE = _answer_of(
    "A choice for each answer. With `stream` it is sent as events with the new tokens of each, and `[DONE]`.",
    {
        "request_id": "9f2c",
        "output_mode": "tokens",
        "model": "default",
        "created": 1795200000,
        "choices": [
            {
                "index": 0,
                "token_ids": [45],
                "logprobs": {"content": [{**_ENTRY, "top_logprobs": [_ENTRY]}]},
                "weight_versions": [{"version": "3", "start": 0, "end": 1}],
                "finish_reason": "length",
                "stop_reason": None,
                "repeat_terminate_triggered": 0,
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
        "prompt_logprobs": None,
    },
    'data: {"request_id":"9f2c",…,"choices":[{"index":0,"token_ids":[45],…}]}\n\ndata: [DONE]\n',
)

INFER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An envelope for each output.",
        "content": {
            _JSON: {
                "schema": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["response", "coordexp"],
                        "properties": {"response": {"type": "object"}, "coordexp": {"type": "object"}},
                    },
                },
                "example": [{"response": _COMPLETION, "coordexp": {"repeat_terminate_triggered": 0}}],
            }
        },
    }
}

FAILURES = (400, 401, 404, 409, 413, 422, 429, 500, 503, 504, 507)
"""Of a route that decodes."""

ERRORS = {
    400: "The request cannot be served; the message says why.",
    401: "The key is missing or wrong.",
    404: "No such model or rollout.",
    409: "The rollout is closed.",
    413: "The body is too large.",
    422: "The request violates the schema; `param` is the path.",
    429: "Too many requests in progress; `Retry-After` says when to try again.",
    500: "The sequence died in the queue, or the gateway has a bug.",
    503: "The broker is unavailable.",
    504: "No answer in time; the message says what was waited for.",
    507: "The directory of `images.store` takes no more pictures; the message names the key.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return documented({status: ERRORS[status] for status in statuses})
