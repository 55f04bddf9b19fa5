"""A chat answer as server-sent events.

    data: {role} ─ data: {content} … ─ data: {tool_calls} ─ data: {finish_reason, token_ids, …} ─ data: {usage} ─ [DONE]

- All text that is sent, put together, is the final text.
- What goes wrong after the first byte is an event with an `error`, and the end: no `[DONE]`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from pipeline.logs import get_logger
from pipeline.wire.messages import Message, TokenDelta
from producers.gateway.answers import Answer, Chunks, tool_call_deltas
from producers.gateway.refusals import refusal_of
from producers.gateway.requests import ChatRequest
from producers.gateway.text_stream import TextStream

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def with_error(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error is the last of them."""
    try:
        async for one in events:
            yield one
    except Exception as error:  # the status was sent: the stream has to say it
        refusal = refusal_of(error)
        get_logger().warning("a stream ended with an error", status=refusal.status, reason=str(refusal))
        yield event(refusal.body())


class ChatStream:
    """The events of one request."""

    def __init__(
        self,
        request: ChatRequest,
        *,
        stop: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        marker: str | None,
        name: str,
    ) -> None:
        self._request = request
        self._chunks = Chunks(request.model, int(time.time()), f"chatcmpl-{name}")
        self._texts = [TextStream(decode, stop, marker) for _ in range(request.count)]

    async def events(self, source: AsyncIterator[TokenDelta | Answer]) -> AsyncIterator[bytes]:
        """Bytes to send; what `source` raises passes through."""
        for index in range(len(self._texts)):
            yield event(self._chunks.delta(index, role="assistant", content=""))
        async for one in source:
            if isinstance(one, Answer):
                for chunk in self._end(one):
                    yield event(chunk)
            elif text := self._texts[index := _index(one)].push(one.token_ids):
                yield event(self._chunks.delta(index, content=text))
        yield DONE

    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index, message in enumerate(answer.messages):
            if text := self._texts[index].finish(_content(message)):
                yield self._chunks.delta(index, content=text)
            if calls := tool_call_deltas(message):
                yield self._chunks.delta(index, tool_calls=calls)
        yield from self._chunks.last(answer, logprobs=bool(self._request.logprobs))
        if self._request.wants_usage:
            yield self._chunks.usage(answer)


def _content(message: Message) -> str:
    return message.get("content") or ""


def _index(delta: TokenDelta) -> int:
    return int(delta.seq_id.rpartition(":")[2])
