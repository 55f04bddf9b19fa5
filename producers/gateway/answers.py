"""Results as an OpenAI chat completion, and the parts that other APIs share: endings, logprobs, text that grows.

- `finish_reason` is one that OpenAI's clients know: `stop` for a natural end and for one forced by the repeat guard
  (there is an end-of-sequence token), `length` for everything cut short.
- Every choice carries `repeat_terminate_triggered` 0|1 and `token_ids`; the completion carries `prompt_token_ids`, and
  `token_ids` and `logprobs` (natural logs, raw, one each) of its first choice.
- The flag comes from the worker; it is never inferred from the ending or the text.
- The text of a stream, concatenated, is the final text. An error after its first byte is an event with an `error`, and
  ends the stream without `[DONE]`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sluice.pipeline.errors import MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import FinishReason, Message, SamplingParams, SequenceResult, TokenDelta
from sluice.pipeline.wire.sampled_tokens import Place
from sluice.producers.gateway.refusals import Refusal, refusal_of
from sluice.producers.gateway.text_stream import TextStream

DONE = b"data: [DONE]\n\n"
NameToken = Callable[[int], dict[str, Any]]
"""Of a token id: `token` and `bytes` of an entry of OpenAI's logprobs."""

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
    logprobs: NameToken | None = None,
    created: int | None = None,
    messages: Sequence[Message] | None = None,
) -> dict[str, Any]:
    """One completion with a choice for each result, all for one prompt; plain values.

    `created` is in Unix seconds (None: now). `logprobs`: add them to each choice, with these names.
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
        "logprobs": sampled_logprobs(first),
    }


def sampled_logprobs(result: SequenceResult) -> list[float] | None:
    """One for each token; None: they weren't asked for, so they weren't computed."""
    return list(result.logprobs) if result.has_logprobs else None


def usage(*answers: Sequence[SequenceResult]) -> dict[str, Any]:
    """Token counts of prompts, each with its answers; `cached_tokens`: of the prompts, not prefilled anew."""
    prompt = sum(len(results[0].prompt_token_ids) for results in answers)
    new = sum(len(result.token_ids) for results in answers for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(results[0].cached_tokens for results in answers)},
    }


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


def stop_reason(result: SequenceResult, sampling: SamplingParams) -> str | int | None:
    """As in vLLM: the stop string or token of the request that ended it, else None."""
    found = result.stop_reason
    return found if found in sampling.stop or found in sampling.stop_token_ids else None


def ending(result: SequenceResult, sampling: SamplingParams) -> dict[str, Any]:
    """How a choice without a message ended."""
    return {
        "finish_reason": finish_reason(result, {}),
        "stop_reason": stop_reason(result, sampling),
        "repeat_terminate_triggered": repeat_terminate_triggered(result),
    }


def _choice(index: int, result: SequenceResult, message: Message, logprobs: NameToken | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "finish_reason": finish_reason(result, message),
        "logprobs": openai_logprobs(result, logprobs) if logprobs else None,
        "token_ids": list(result.token_ids),
        "repeat_terminate_triggered": repeat_terminate_triggered(result),
    }


def by_id(token: int) -> dict[str, Any]:
    """`token_id:N`, as vLLM names tokens where it is asked for ids."""
    return {"token": f"token_id:{token}", "bytes": None}


def openai_logprobs(result: SequenceResult, name: NameToken) -> dict[str, Any]:
    """In OpenAI's format."""
    places = [()] * len(result.token_ids) if result.ranked is None else map(_alternatives, result.ranked.places())
    return {
        "content": [
            {**name(token), "logprob": logprob, "top_logprobs": [{**name(one), "logprob": its} for one, its in others]}
            for token, logprob, others in zip(result.token_ids, result.logprobs, places, strict=True)
        ]
    }


def _alternatives(place: Place) -> list[tuple[int, float]]:
    return list(zip(place.token_ids, place.logprobs, strict=True))


def prompt_logprobs(result: SequenceResult, name: NameToken) -> list[dict[str, Any] | None] | None:
    """As vLLM: None for the first token, then by token id; None for a request that didn't ask."""
    ranked = result.prompt_ranked
    if ranked is None:
        return None
    found: list[dict[str, Any] | None] = [None]
    for token, logprob, place in zip(result.prompt_token_ids[1:], ranked.logprobs, ranked.places(), strict=True):
        entries = {token: (logprob, place.rank)}
        for rank, (other, its) in enumerate(_alternatives(place), 1):
            entries.setdefault(other, (its, rank))
        found.append(
            {
                str(one): {"logprob": its, "rank": rank, "decoded_token": name(one)["token"]}
                for one, (its, rank) in entries.items()
            }
        )
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Results of one prompt, each with its `prompt_token_ids`, and their messages."""

    model: str
    results: Sequence[SequenceResult]
    messages: Sequence[Message]
    rollout: dict[str, Any] | None = None  # rollout_id, turn, parent, resynced
    asked: Sequence[Message] = ()  # the messages it answers, as they are kept: images by digest

    def completion(self, *, logprobs: NameToken | None, names: NameToken | None = None) -> dict[str, Any]:
        """The whole answer. `names`: of the prompt's tokens, if their logprobs were asked for."""
        made = chat_completion(self.results, model=self.model, logprobs=logprobs, messages=self.messages)
        if names is not None and (of_prompt := prompt_logprobs(self.results[0], names)) is not None:
            made["prompt_logprobs"] = of_prompt
        return made if self.rollout is None else {**made, "rollout": self.rollout}


def own_fields(answer: Answer) -> dict[str, Any]:
    """The fields that only we have, named as in a chat completion."""
    [result] = answer.results
    own: dict[str, Any] = {
        "system_fingerprint": fingerprint(result),
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "logprobs": sampled_logprobs(result),
    }
    return own if answer.rollout is None else {**own, "rollout": answer.rollout}


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def with_error(
    events: AsyncIterator[bytes], shape: Callable[[Refusal], bytes] | None = None
) -> AsyncIterator[bytes]:
    """The events; an error becomes the last one, in `shape` (None: OpenAI's)."""
    try:
        async for one in events:
            yield one
    except Exception as error:  # the status has already been sent, so the stream must report it
        refusal = refusal_of(error)
        get_logger().warning("a stream ended with an error", status=refusal.status, reason=str(refusal))
        yield shape(refusal) if shape else event(refusal.body())


async def texts(
    source: AsyncIterator[TokenDelta | Answer], streams: Sequence[TextStream]
) -> AsyncIterator[tuple[int, str] | Answer]:
    """The texts of a streamed answer as they may be shown, each with its choice's index; then the answer."""
    async for one in source:
        if isinstance(one, Answer):
            for index, message in enumerate(one.messages):
                if text := streams[index].finish(message.get("content") or ""):
                    yield index, text
            yield one
        elif text := streams[index := place_of(one)].push(one.token_ids):
            yield index, text


def place_of(delta: TokenDelta) -> int:
    """The index of its sequence among the answers of a prompt."""
    return int(delta.seq_id.rpartition(":")[2])


def places_of(result: SequenceResult) -> list[Place]:
    """The alternatives of each token; none if they weren't asked for."""
    return [] if result.ranked is None else result.ranked.places()


class Columns:
    """What of each sequence has been sent: deltas may overlap, and the result has the rest."""

    def __init__(self, count: int) -> None:
        self._sent = [0] * count

    def of_delta(self, delta: TokenDelta) -> tuple[int, list[int], list[float], list[Place]]:
        """Its index, and the new tokens, logprobs and places. A delta that would leave a gap waits for the result."""
        index = place_of(delta)
        known = self._sent[index] - delta.offset
        if known < 0:
            return index, [], [], []
        places = [] if delta.ranked is None else delta.ranked.places()[known:]
        tokens, logprobs = list(delta.token_ids)[known:], list(delta.logprobs)[known:]
        self._sent[index] += len(tokens)
        return index, tokens, logprobs, places

    def rest(self, result: SequenceResult) -> tuple[list[int], list[float], list[Place]]:
        """What no delta brought."""
        sent = self._sent[result.index]
        return list(result.token_ids)[sent:], list(result.logprobs)[sent:], places_of(result)[sent:]
