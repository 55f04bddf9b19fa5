"""The events of a streamed answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, get_args

from sluice.pipeline.errors import MessageError
from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.pipeline.wire.messages import FinishReason, TokenDelta
from sluice.pipeline.wire.tokens import FloatArray, TokenArray
from sluice.producers.gateway.answers import DONE, Answer, by_id, finish_reason, with_error
from sluice.producers.gateway.apis.chat_completions import ChatRequest, ChatStream
from sluice.producers.gateway.refusals import Refusal
from tests.factories import sequence_result

MESSAGES = [{"role": "user", "content": "a"}]


def delta(index: int, text: str) -> TokenDelta:
    return TokenDelta(
        seq_id=f"r:job:{index}", offset=0, token_ids=TokenArray(map(ord, text)), logprobs=FloatArray([0.0] * len(text))
    )


class Letters(TextDecoder):
    """A token is a character."""

    def __init__(self) -> None:
        self.byte_ids = frozenset()

    def __call__(self, token_ids: Sequence[int], /) -> str:
        return "".join(map(chr, token_ids))


letters = Letters()


async def chunks(*source: TokenDelta | Answer, marker: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    async def given() -> AsyncIterator[TokenDelta | Answer]:
        for one in source:
            yield one

    request = ChatRequest.model_validate({"messages": MESSAGES, "stream": True, **fields})
    stream = ChatStream(
        request, stop=(), decode=letters, marker=marker, name="n", logprobs=by_id if request.logprobs else None
    )
    sent = [raw async for raw in stream.events(given())]
    assert sent.pop() == DONE
    return [json.loads(raw.removeprefix(b"data: ")) for raw in sent]


def test_every_ending_with_tokens_has_a_finish_reason_of_openai() -> None:
    message = {"role": "assistant", "content": "a"}
    found: dict[str, str] = {}
    for ending in get_args(FinishReason):
        result = sequence_result("job", finish_reason=ending)
        try:
            found[ending] = finish_reason(result, message)
        except MessageError:
            assert ending == "error", f"{ending} has no row in the gateway's table"
    assert set(found.values()) == {"stop", "length"}


async def test_role_text_end_and_usage_come_in_this_order() -> None:
    result = sequence_result("job", text="hello")
    answer = Answer("default", [result], [{"role": "assistant", "content": "hello"}])
    role, one, rest, last, usage = await chunks(
        delta(0, "hel "), answer, stream_options={"include_usage": True}, logprobs=True
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in (one, rest)] == [{"content": "hel"}, {"content": "lo"}]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (last["token_ids"], last["prompt_token_ids"], last["logprobs"]) == ([7, 8, 9], [5, 6], [-0.5, -1.0, -1.5])
    assert len(last["choices"][0]["logprobs"]["content"]) == 3
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert usage["choices"] == []


async def test_each_answer_has_a_text_of_its_own() -> None:
    results = [sequence_result("job", index, 2) for index in range(2)]
    answer = Answer("m", results, [{"role": "assistant", "content": text} for text in ("ab", "cd")])
    found = await chunks(delta(1, "c"), delta(0, "a"), delta(1, "d"), answer, n=2)
    texts = ["", ""]
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["ab", "cd"]
    assert [chunk["choices"][0]["token_ids"] for chunk in found[-2:]] == [[7, 8, 9], [7, 8, 9]]
    assert "token_ids" not in found[-1]


async def test_calls_are_numbered_and_end_with_their_reason() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = Answer("m", [sequence_result("job")], [{"role": "assistant", "content": None, "tool_calls": [call]}])
    role, calls, last = await chunks(delta(0, "<tool_call>{"), answer, marker="<tool_call>")
    assert calls["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **call}]}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert role["id"] == last["id"] == "chatcmpl-n"


async def test_an_error_after_the_first_byte_is_an_event_and_the_end() -> None:
    async def broken() -> AsyncIterator[TokenDelta | Answer]:
        yield delta(0, "hel")
        raise Refusal(504, "waited for a worker")

    request = ChatRequest.model_validate({"messages": MESSAGES, "stream": True})
    stream = ChatStream(request, stop=(), decode=letters, marker=None, name="n")
    sent = [json.loads(raw.removeprefix(b"data: ")) async for raw in with_error(stream.events(broken()))]
    assert sent[1]["choices"][0]["delta"] == {"content": "hel"}
    assert (sent[2]["error"]["message"], sent[2]["error"]["code"]) == ("waited for a worker", "timeout")
    assert len(sent) == 3
