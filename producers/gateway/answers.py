"""The answer to one chat call, in OpenAI's form, with what it has no word for beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.wire.messages import Message, SequenceResult
from producers.gateway import completion


@dataclass(frozen=True, slots=True)
class Answer:
    """Results of one prompt, each with its `prompt_token_ids`, and the messages that they say."""

    model: str
    results: Sequence[SequenceResult]
    messages: Sequence[Message]
    rollout: dict[str, Any] | None = None  # rollout_id, turn, parent, resynced

    def completion(self, *, logprobs: bool) -> dict[str, Any]:
        """The whole answer."""
        made = completion.chat_completion(self.results, model=self.model, logprobs=logprobs, messages=self.messages)
        return made if self.rollout is None else {**made, "rollout": self.rollout}


class Chunks:
    """The answer piece by piece, each one as plain values."""

    def __init__(self, model: str, created: int, completion_id: str) -> None:
        self._head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def delta(self, index: int, **delta: Any) -> dict[str, Any]:
        """A piece of one choice."""
        return {**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}

    def last(self, answer: Answer, *, logprobs: bool) -> Iterator[dict[str, Any]]:
        """How each choice ended, with its ids; the answer's own fields are in the first one's."""
        whole = answer.completion(logprobs=logprobs)
        for choice in whole["choices"]:
            kept = {key: value for key, value in choice.items() if key != "message"}
            chunk = {**self._head, "choices": [{**kept, "delta": {}}]}
            if choice["index"] == 0:
                names = ("system_fingerprint", "prompt_token_ids", "token_ids", "logprobs", "rollout")
                chunk |= {name: whole[name] for name in names if name in whole}
            yield chunk

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Of all choices."""
        return {**self._head, "choices": [], "usage": completion.usage(answer.results)}


def tool_call_deltas(message: Message) -> list[dict[str, Any]]:
    """A message's calls as a stream says them: numbered."""
    return [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
