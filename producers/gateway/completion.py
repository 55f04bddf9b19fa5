"""A result as an OpenAI chat completion, with extra fields for what OpenAI doesn't cover.

- `finish_reason` is one that OpenAI's clients know: `stop` for a natural end and for one forced by the repeat guard
  (there is an end-of-sequence token), `length` for everything cut short.
- Every choice carries `repeat_terminate_triggered` 0|1 and `token_ids`; the completion carries `prompt_token_ids`, and
  `token_ids` and `logprobs` (natural logs, raw, one each) of its first choice.
- The flag comes from the worker; it is never inferred from the ending or the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import FinishReason, Message, SequenceResult

_FINISH: dict[FinishReason, str] = {
    "stop": "stop",
    "repeat_terminated": "stop",
    "length": "length",
    "deadline": "length",
    "cancelled": "length",
}


def repeat_terminate_triggered(result: SequenceResult) -> Literal[0, 1]:
    """The worker's flag. Raises MessageError if flag and ending contradict each other."""
    flag = result.triggers.get("repeat_terminate", 0)
    if flag not in (0, 1) or bool(flag) != (result.finish_reason == "repeat_terminated"):
        raise MessageError(
            f"{result.seq_id}: triggers.repeat_terminate is {flag!r}, but it ended with {result.finish_reason}; this "
            "is a bug of the worker that wrote it"
        )
    return 1 if flag else 0


def chat_completion(
    results: Sequence[SequenceResult],
    *,
    model: str,
    logprobs: bool = False,
    created: int | None = None,
    messages: Sequence[Message] | None = None,
) -> dict[str, Any]:
    """One completion with a choice for each result, all for one prompt; plain values.

    `created` is in Unix seconds (None: now). `logprobs`: add them to each choice; tokens are named `token_id:<id>`.
    `messages`: the message of each choice (None: its text).
    Raises MessageError if there are no results, or one is an error without an answer.
    """
    if not results:
        raise MessageError("a chat completion needs at least one result")
    said = messages or [{"role": "assistant", "content": result.text} for result in results]
    first = results[0]
    return {
        "id": f"chatcmpl-{first.seq_id}",
        "object": "chat.completion",
        "created": int(time.time()) if created is None else created,
        "model": model,
        "system_fingerprint": fingerprint(first),
        "choices": [
            _choice(index, result, message, logprobs)
            for index, (result, message) in enumerate(zip(results, said, strict=True))
        ],
        "usage": usage(results),
        "prompt_token_ids": list(first.prompt_token_ids),
        "token_ids": list(first.token_ids),
        "logprobs": list(first.logprobs),
    }


def usage(results: Sequence[SequenceResult]) -> dict[str, int]:
    """Token counts of one prompt and its answers."""
    prompt, new = len(results[0].prompt_token_ids), sum(len(result.token_ids) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def fingerprint(result: SequenceResult) -> str:
    """Which weights sampled it: `v3`, or `v3-4` if newer ones were loaded meanwhile."""
    versions = [version for version in result.versions if version >= 0]
    if not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"v{low}" if low == high else f"v{low}-{high}"


def finish_reason(result: SequenceResult, message: Message) -> str:
    """In OpenAI's terms. Raises MessageError for an error without an answer."""
    if result.finish_reason not in _FINISH:
        raise MessageError(f"{result.seq_id}: it ended with {result.finish_reason}, so there is no answer to send")
    found = _FINISH[result.finish_reason]
    return "tool_calls" if found == "stop" and message.get("tool_calls") else found


def _choice(index: int, result: SequenceResult, message: Message, logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "finish_reason": finish_reason(result, message),
        "logprobs": openai_logprobs(result) if logprobs else None,
        "token_ids": list(result.token_ids),
        "repeat_terminate_triggered": repeat_terminate_triggered(result),
    }


def openai_logprobs(result: SequenceResult) -> dict[str, Any]:
    """In OpenAI's format."""
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """Results of one prompt, each with its `prompt_token_ids`, and their messages."""

    model: str
    results: Sequence[SequenceResult]
    messages: Sequence[Message]
    rollout: dict[str, Any] | None = None  # rollout_id, turn, parent, resynced

    def completion(self, *, logprobs: bool) -> dict[str, Any]:
        """The whole answer."""
        made = chat_completion(self.results, model=self.model, logprobs=logprobs, messages=self.messages)
        return made if self.rollout is None else {**made, "rollout": self.rollout}


class Chunks:
    """The answer in pieces, each as plain values."""

    def __init__(self, model: str, created: int, completion_id: str) -> None:
        self._head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def delta(self, index: int, **delta: Any) -> dict[str, Any]:
        """A piece of one choice."""
        return {**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}

    def last(self, answer: Answer, *, logprobs: bool) -> Iterator[dict[str, Any]]:
        """How each choice ended, with its ids; the first one also has the answer's own fields."""
        whole = answer.completion(logprobs=logprobs)
        for choice in whole["choices"]:
            kept = {key: value for key, value in choice.items() if key != "message"}
            chunk = {**self._head, "choices": [{**kept, "delta": {}}]}
            if choice["index"] == 0:
                names = ("system_fingerprint", "prompt_token_ids", "token_ids", "logprobs", "rollout")
                chunk |= {name: whole[name] for name in names if name in whole}
            yield chunk

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Token counts of all choices."""
        return {**self._head, "choices": [], "usage": usage(answer.results)}


def tool_call_deltas(message: Message) -> list[dict[str, Any]]:
    """A message's calls in streaming format: numbered."""
    return [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
