"""A result as an OpenAI chat completion, with what OpenAI has no word for as extra fields.

- `finish_reason` is one that OpenAI's clients know: `stop` for a natural end and for one that the repeat guard forced
  (an end-of-sequence token is there), `length` for all that was cut short.
- Every choice carries `repeat_terminate_triggered` 0|1 and `token_ids`; the completion carries `prompt_token_ids`, and
  `token_ids` and `logprobs` (natural logs, raw, one each) of its first choice.
- The flag is the worker's own, never a guess from the ending or the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from pipeline.errors import MessageError
from pipeline.wire.messages import FinishReason, Message, SequenceResult

_FINISH: dict[FinishReason, str] = {
    "stop": "stop",
    "repeat_terminated": "stop",
    "length": "length",
    "deadline": "length",
    "cancelled": "length",
}


def repeat_terminate_triggered(result: SequenceResult) -> Literal[0, 1]:
    """The explicit signal. Raises MessageError where flag and ending contradict each other."""
    flag = result.triggers.get("repeat_terminate", 0)
    if flag not in (0, 1) or bool(flag) != (result.finish_reason == "repeat_terminated"):
        raise MessageError(
            f"{result.seq_id}: triggers.repeat_terminate is {flag!r}, and it ended with {result.finish_reason}; "
            "this is a fault of the worker that wrote it"
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
    """One completion with a choice for each result, all of one prompt; plain values.

    `created` is in Unix seconds (None: now). `logprobs`: of each choice too; tokens are named `token_id:<id>`.
    `messages`: what each choice says (None: its text).
    Raises MessageError for no results, or one that is an error and no answer.
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
    """Tokens of one prompt and its answers."""
    prompt, new = len(results[0].prompt_token_ids), sum(len(result.token_ids) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def fingerprint(result: SequenceResult) -> str:
    """Which weights sampled it: `v3`, or `v3-4` where new ones came on the way."""
    versions = [version for version in result.versions if version >= 0]
    if not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"v{low}" if low == high else f"v{low}-{high}"


def finish_reason(result: SequenceResult, message: Message) -> str:
    """In OpenAI's words. Raises MessageError for one that is an error and no answer."""
    if result.finish_reason not in _FINISH:
        raise MessageError(f"{result.seq_id}: it ended with {result.finish_reason}, which is no answer to send")
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
    """As OpenAI writes them."""
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }
