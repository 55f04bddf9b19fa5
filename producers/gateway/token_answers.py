"""Answers in text or tokens: OpenAI's text completions, and vLLM's generate, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sluice.pipeline.wire.messages import SamplingParams, SequenceResult, TokenDelta
from sluice.pipeline.wire.sampled_tokens import Place
from sluice.producers.gateway.completion import (
    DONE,
    Answer,
    DecodeText,
    NameToken,
    TextStream,
    by_id,
    event,
    fingerprint,
    finish_reason,
    place_of,
    prompt_logprobs,
    repeat_terminate_triggered,
    usage,
)
from sluice.producers.gateway.token_requests import CompletionRequest, GenerateRequest


def stop_reason(result: SequenceResult, sampling: SamplingParams) -> str | int | None:
    """As in vLLM: the stop string or token of the request that ended it, else None."""
    found = result.stop_reason
    return found if found in sampling.stop or found in sampling.stop_token_ids else None


def _ending(result: SequenceResult, sampling: SamplingParams) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason(result, {}),
        "stop_reason": stop_reason(result, sampling),
        "repeat_terminate_triggered": repeat_terminate_triggered(result),
    }


class Completions:
    """Text completions of one request."""

    def __init__(
        self, request: CompletionRequest, sampling: SamplingParams, *, decode: DecodeText, names: NameToken, name: str
    ) -> None:
        self._request, self._sampling, self._decode = request, sampling, decode
        self._names = by_id if request.return_tokens_as_token_ids else names
        self._head = {
            "id": f"cmpl-{name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """One choice for each prompt's results, in order."""
        results = [(answer, result) for answer in answers for result in answer.results]
        choices = [
            {
                "index": index,
                "text": self._prompt(result) + self._text(result),
                "logprobs": self._whole_logprobs(result),
                "prompt_logprobs": prompt_logprobs(result, self._names)
                if self._request.prompt_logprobs is not None
                else None,
                **_ending(result, self._sampling),
                **self._ids(result.prompt_token_ids, result.token_ids),
            }
            for index, (_, result) in enumerate(results)
        ]
        made = {
            **self._head,
            "system_fingerprint": fingerprint(results[0][1]),
            "choices": choices,
            "usage": usage(*(answer.results for answer in answers)),
        }
        return made if answers[0].rollout is None else {**made, "rollout": answers[0].rollout}

    async def events(self, source: AsyncIterator[TokenDelta | Answer], prompt: Sequence[int]) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through. The texts, concatenated, are the text."""
        texts = [TextStream(self._decode, self._sampling.stop, strip=False) for _ in range(self._request.count)]
        columns = _Columns(self._request.count)
        offsets = [0] * self._request.count  # characters of the tokens' own texts
        if self._request.echo:
            for index in range(self._request.count):
                yield event(self._chunk(index, self._decode(prompt), [], [], [], offsets))
        async for one in source:
            if isinstance(one, TokenDelta):
                index, tokens, logprobs, places = columns.of_delta(one)
                yield event(self._chunk(index, texts[index].push(tokens), tokens, logprobs, places, offsets))
                continue
            for result in one.results:
                tokens, logprobs, places = columns.rest(result)
                text = texts[result.index].finish(self._text(result))
                last = self._chunk(result.index, text, tokens, logprobs, places, offsets)
                last["choices"][0] |= _ending(result, self._sampling) | self._prompt_ids(result)
                last["system_fingerprint"] = fingerprint(result)
                yield event(last if one.rollout is None else {**last, "rollout": one.rollout})
            if self._request.stream_options is not None and self._request.stream_options.include_usage:
                yield event({**self._head, "choices": [], "usage": usage(one.results)})
        yield DONE

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        places: Sequence[Place],
        offsets: list[int],
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None}
        choice["logprobs"] = self._logprobs(tokens, logprobs, places, offsets[index])
        offsets[index] += sum(len(self._names(token)["token"]) for token in tokens)
        if self._request.return_token_ids:
            choice["token_ids"] = list(tokens)
        return {**self._head, "choices": [choice]}

    def _text(self, result: SequenceResult) -> str:
        """All that was sampled, white space included, without special tokens, up to a stop string."""
        text = self._decode(list(result.token_ids))
        ends = [at for stop in self._sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _prompt(self, result: SequenceResult) -> str:
        return self._decode(list(result.prompt_token_ids)) if self._request.echo else ""

    def _whole_logprobs(self, result: SequenceResult) -> dict[str, Any] | None:
        tokens, logprobs, places = list(result.token_ids), list[float | None](result.logprobs), _places(result)
        if self._request.echo and result.prompt_ranked is not None:
            tokens = [*result.prompt_token_ids, *tokens]
            logprobs = [None, *result.prompt_ranked.logprobs, *logprobs]
            places = [Place(0), *result.prompt_ranked.places(), *(places or [Place(0)] * len(result.token_ids))]
        return self._logprobs(tokens, logprobs, places, 0)

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], places: Sequence[Place], offset: int
    ) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        names = [self._names(token)["token"] for token in tokens]
        offsets = [offset + sum(map(len, names[:place])) for place in range(len(names))]
        top: list[dict[str, float] | None] = []
        for name, logprob, place in zip(names, logprobs, places or [Place(0)] * len(names), strict=True):
            others = {self._names(one)["token"]: its for one, its in zip(place.token_ids, place.logprobs, strict=True)}
            top.append(None if logprob is None else {name: logprob, **others})
        return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": top, "text_offset": offsets}

    def _ids(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(prompt), "token_ids": list(tokens)}

    def _prompt_ids(self, result: SequenceResult) -> dict[str, Any]:
        return {"prompt_token_ids": list(result.prompt_token_ids)} if self._request.return_token_ids else {}


class Generated:
    """Token sequences of one request, in vLLM's format."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams, *, request_id: str) -> None:
        self._request, self._sampling = request, sampling
        self._head = {"request_id": request_id, "output_mode": "tokens"}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A choice for each result."""
        return {
            **self._head,
            "model": answer.model,
            "created": int(time.time()),
            "choices": [
                self._choice(result, result.token_ids, result.logprobs, _places(result)) for result in answer.results
            ],
            "usage": usage(answer.results),
            "prompt_logprobs": prompt_logprobs(answer.results[0], by_id),
            **self._about(answer),
        }

    async def events(self, source: AsyncIterator[TokenDelta | Answer]) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through. The token ids, concatenated, are the sequence."""
        columns = _Columns(self._request.sampling_params.count)
        async for one in source:
            if isinstance(one, TokenDelta):
                index, tokens, logprobs, places = columns.of_delta(one)
                entries = self._logprobs(tokens, logprobs, places)
                choice = {"index": index, "token_ids": list(tokens), "logprobs": entries}
                yield event({**self._head, "choices": [{**choice, "finish_reason": None}]})
                continue
            for result in one.results:
                choice = self._choice(result, *columns.rest(result))
                yield event({**self._head, "choices": [choice], **self._about(one)})
            if self._request.stream_options is not None and self._request.stream_options.include_usage:
                yield event({**self._head, "choices": [], "usage": usage(one.results)})
        yield DONE

    def _choice(
        self, result: SequenceResult, tokens: Sequence[int], logprobs: Sequence[float], places: Sequence[Place]
    ) -> dict[str, Any]:
        return {
            "index": result.index,
            "token_ids": list(tokens),
            "logprobs": self._logprobs(tokens, logprobs, places),
            "weight_versions": _spans(list(result.versions)),
            **_ending(result, self._sampling),
        }

    def _about(self, answer: Answer) -> dict[str, Any]:
        ids = list(answer.results[0].prompt_token_ids)
        found: dict[str, Any] = {"prompt_token_ids": ids} if self._request.return_token_ids else {}
        return found if answer.rollout is None else {**found, "rollout": answer.rollout}

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], places: Sequence[Place]
    ) -> dict[str, Any] | None:
        """Both dialects: older vLLM names a token `token_id:N`, newer ones have `token_id`."""
        most = self._request.sampling_params.logprobs
        if most is None:
            return None
        content: list[dict[str, Any]] = []
        for token, logprob, place in zip(tokens, logprobs, places or [Place(0)] * len(tokens), strict=True):
            top = {token: _entry(token, logprob, place.rank)}
            for rank, (one, its) in enumerate(zip(place.token_ids, place.logprobs, strict=True), 1):
                top.setdefault(one, _entry(one, its, rank))
            content.append({**top[token], "top_logprobs": list(top.values())[: max(most, 1)]})
        return {"content": content}


def _entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {**by_id(token), "token_id": token, "logprob": logprob, "rank": rank or None}


def _places(result: SequenceResult) -> list[Place]:
    return [] if result.ranked is None else result.ranked.places()


class _Columns:
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
        return list(result.token_ids)[sent:], list(result.logprobs)[sent:], _places(result)[sent:]


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of equal weight versions, as `[start, end)` of the sampled tokens."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": str(version), "start": place, "end": place + 1})
    return spans
