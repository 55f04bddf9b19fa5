"""`/v1/completions`: OpenAI's text completions, of text or token ids, plain or as a turn of a rollout."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import ConfigDict, Field

from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, SamplingParams, SequenceResult, TokenDelta
from sluice.pipeline.wire.sampled_tokens import Place
from sluice.producers.gateway.answers import (
    DONE,
    Answer,
    Columns,
    NameToken,
    by_id,
    ending,
    event,
    fingerprint,
    places_of,
    prompt_logprobs,
    usage,
    with_error,
)
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.openapi import COMPLETION_EXAMPLES, COMPLETIONS, FAILURES, errors
from sluice.producers.gateway.apis.requests import (
    MODEL,
    TURN_OF,
    FormattedOptions,
    Ids,
    StreamOptions,
    check_stream_options,
    in_rollout,
)
from sluice.producers.gateway.apis.tokens import encoding
from sluice.producers.gateway.chat import Once, TokenCall
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.service import (
    JSON,
    SCOPE,
    Events,
    IdempotencyKey,
    RolloutHeader,
    RolloutPath,
    Service,
    unless_gone,
)
from sluice.producers.gateway.text_stream import TextStream
from sluice.producers.http.schemas import STOP
from sluice.producers.http.strict_json import StrictRoute


class CompletionRequest(FormattedOptions):
    """`POST /v1/completions`."""

    unserved = fields.COMPLETION
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "15 times 23 is", "max_tokens": 8}]})

    model: str = MODEL
    prompt: str | Annotated[list[str], STOP] | Ids | Annotated[list[Ids], STOP] = Field(
        description="Text or token ids, or a list of either."
    )
    rollout_id: str | None = TURN_OF
    echo: bool | None = Field(default=None, description="The text begins with the prompt's, and `logprobs` too.")
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description="Of each token, and of so many of the likeliest."
    )
    add_special_tokens: bool | None = Field(default=None, description="With text; null: true, as in vLLM.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events. With one prompt.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    return_token_ids: bool | None = Field(default=None, description="Add `prompt_token_ids` and `token_ids`.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of `logprobs` `token_id:N` instead of by their text."
    )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, all of one kind."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    @property
    def alternatives(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs or None

    @property
    def of_prompt(self) -> int | None:
        """As `prompt_logprobs` says, or `echo` with `logprobs`."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        check_stream_options(self.stream_options)
        self.check_rollout(self.rollout_id)
        self.check_prompt_logprobs(self.stream)
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise Refusal(400, "prompt has no tokens; send at least one", "prompt")
        if len(self.prompts) > 1 and self.rollout_id is not None:
            raise Refusal(400, "prompt: a rollout's turn has one; send one call for each", "prompt")
        if len(self.prompts) > 1 and self.stream:
            raise Refusal(400, "stream with several prompts is not supported; send one call for each", "stream")


class Completions:
    """Text completions of one request."""

    def __init__(
        self, request: CompletionRequest, sampling: SamplingParams, *, decode: TextDecoder, names: NameToken, name: str
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
                **ending(result, self._sampling),
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
        columns = Columns(self._request.count)
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
                last["choices"][0] |= ending(result, self._sampling) | self._prompt_ids(result)
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
        tokens, logprobs, places = list(result.token_ids), list[float | None](result.logprobs), places_of(result)
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
        *offsets, _ = accumulate(map(len, names), initial=offset)
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


_CompletionBody = Annotated[CompletionRequest, Body(openapi_examples=COMPLETION_EXAMPLES)]


def completion_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["tokens"])
    said: dict[str, Any] = {"response_model": None, "responses": COMPLETIONS | errors(*FAILURES)}

    @router.post("/v1/completions", summary="A text completion", **said)
    async def completions(
        body: _CompletionBody,
        request: Request,
        x_rollout_id: RolloutHeader = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """OpenAI's protocol without a chat: the prompt is text or token ids, and the text keeps its white space."""
        return await _complete(service, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/v1/completions", summary="A text completion as a turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _CompletionBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """The prompt begins with the tokens of an earlier turn, or forks the rollout."""
        return await _complete(service, in_rollout(body, header=x_rollout_id, url=rollout_id), request)

    return router


async def _calls(service: Service, body: CompletionRequest) -> list[TokenCall]:
    calls: list[TokenCall] = []
    for prompt in body.prompts:
        special = body.add_special_tokens is not False
        if isinstance(prompt, str):
            token_ids: list[int] = await service.rendered(encoding(service, prompt, special, "prompt"))
        else:
            token_ids = prompt
        if not token_ids:
            raise Refusal(400, "prompt has no tokens; send at least one", "prompt")
        asked = body.logprobs is not None
        calls.append(TokenCall(body.model, token_ids, body.count, body.stream, body.rollout_id, logprobs=asked))
    return calls


async def _complete(
    service: Service, body: CompletionRequest, request: Request, idempotency_key: str | None = None
) -> Response:
    service.chat.check_model(body.model, body.rollout_id)
    body.check()
    sampling = body.sampling(service.config.sampling)
    made = Completions(body, sampling, decode=service.decode, names=service.token_names, name=secrets.token_hex(12))
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter(len(body.prompts)))
        calls = await _calls(service, body)
        if body.stream:
            once = Once.of(idempotency_key, body, body.count)
            source = await held.enter_async_context(aclosing(service.chat.token_events(calls[0], sampling, once)))
            first = await unless_gone(request, anext(source))  # refusals come before the first byte
            events = with_error(made.events(service.counted(first, source), calls[0].token_ids))
            return Events(events, held.pop_all())
        work = _all_answers(service, calls, sampling, partial(Once.of, idempotency_key, body, body.count))
        answers = await unless_gone(request, work)
    for answer in answers:
        service.count_tokens(answer)
    return Response(msgspec.json.encode(made.whole(answers)), media_type=JSON)


async def _all_answers(
    service: Service, calls: list[TokenCall], sampling: SamplingParams, once_of: Callable[[int], Once | None]
) -> list[Answer]:
    tasks = [asyncio.create_task(_answer(service, call, sampling, once_of(place))) for place, call in enumerate(calls)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(service: Service, call: TokenCall, sampling: SamplingParams, once: Once | None) -> Answer:
    async with aclosing(service.chat.token_events(call, sampling, once)) as events:
        found = [event async for event in events if isinstance(event, Answer)]
    return found[0]
