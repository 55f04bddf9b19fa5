"""A chat answer as server-sent events.

    data: {role} ─ data: {content} … ─ data: {tool_calls} ─ data: {finish_reason, token_ids, …} ─ data: {usage} ─ [DONE]

- The concatenated text is the final text.
- An error after the first byte is an event with an `error`, and ends the stream without `[DONE]`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import Message, TokenDelta
from sluice.producers.gateway.completion import Answer, Chunks, tool_call_deltas
from sluice.producers.gateway.refusals import refusal_of
from sluice.producers.gateway.requests import ChatRequest

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def with_error(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error becomes the last one."""
    try:
        async for one in events:
            yield one
    except Exception as error:  # the status has already been sent, so the stream must report it
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
        """Bytes to send; exceptions of `source` pass through."""
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


DecodeText = Callable[[Sequence[int]], str]

_MOST_HELD = 256  # tokens; a character has at most 4 bytes, so these are all broken characters


class TextStream:
    """The text of one sequence as its tokens arrive: `push` tokens, then `finish` with the worker's text.

    - The shown text is always a prefix of the final text: stripped, without special tokens, cut at a stop string.
    - Held back: an unfinished character, trailing white space, a possible start of a stop string or tool call, and
      everything from a tool call's marker on.
    - A token costs the same anywhere in the sequence: only tokens since the last whole character are decoded again.
    """

    def __init__(self, decode: DecodeText, stop: Sequence[str] = (), marker: str | None = None) -> None:
        """`decode` omits special tokens. Nothing is shown from `marker` on; with "", nothing before the end."""
        self._characters, self._stop, self._marker = _Characters(decode), tuple(filter(None, stop)), marker
        self._sent = ""
        self._text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now."""
        for token in token_ids:
            self._text += self._characters.push(token)
        return self._show(_cut(self._text, self._stop, self._marker).lstrip()) if self._marker != "" else ""

    def finish(self, text: str) -> str:
        """The missing rest of the final text; empty if that doesn't continue what was shown."""
        return text[len(self._sent) :] if text.startswith(self._sent) else ""

    def _show(self, visible: str) -> str:
        more = visible.rstrip()[len(self._sent) :]
        self._sent += more
        return more


class _Characters:
    """Tokens to whole characters; the last shown tokens stay as left context: a first token may lose its space."""

    def __init__(self, decode: DecodeText) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_known = 0  # leading tokens with their text already returned
        self._num_given = 0  # characters already returned

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        broken = text.endswith("\ufffd")
        whole = text[:-1] if broken else text  # later tokens can only change the last character
        new = whole[self._num_given :]
        self._num_given = max(self._num_given, len(whole))
        if not broken or len(self._window) - self._num_known > _MOST_HELD:
            self._window = self._window[self._num_known :]
            self._num_known = len(self._window)
            self._num_given = len(self._decode(self._window))
        return new


def _cut(text: str, stop: Sequence[str], marker: str | None) -> str:
    """The text before the first stop string or marker, or a possible start of one."""
    ends = (*stop, marker) if marker else tuple(stop)
    whole = min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))
    return text[: min([whole, *(_maybe(text, end) for end in ends)])]


def _maybe(text: str, end: str) -> int:
    """Position of the longest text suffix that is a prefix of `end`; the text's length if there is none."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:length]):
            return len(text) - length
    return len(text)
