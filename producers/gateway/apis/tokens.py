"""vLLM's `/inference/v1/generate`, `/tokenize` and `/detokenize`: token ids in, token ids out, and the tokenizer."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, SamplingParams, SequenceResult, TokenDelta
from sluice.pipeline.wire.sampled_tokens import Place
from sluice.producers.gateway.answers import (
    DONE,
    Answer,
    Columns,
    by_id,
    ending,
    event,
    places_of,
    prompt_logprobs,
    usage,
)
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.apis.openapi import FAILURES, GENERATE, GENERATE_EXAMPLES, errors
from sluice.producers.gateway.apis.requests import (
    TURN_OF,
    ChatMessage,
    Ids,
    SamplingOptions,
    StreamOptions,
    check_can_travel,
    check_stream_options,
    in_rollout,
    template_kwargs,
)
from sluice.producers.gateway.chat import Once, TokenCall
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.service import (
    SCOPE,
    IdempotencyKey,
    RolloutHeader,
    RolloutPath,
    Service,
)
from sluice.producers.http.schemas import MAX_ID_LENGTH, STOP, JsonObject
from sluice.producers.http.strict_json import StrictRoute


class GenerateSampling(SamplingOptions):
    """vLLM's SamplingParams, as far as they are served."""

    unserved = fields.SAMPLING

    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="Of the sampled tokens; `top_logprobs` has them first, then the likeliest others, so many in all.",
    )

    @property
    def alternatives(self) -> int | None:
        """As `logprobs` says; 0: ranks."""
        return self.logprobs


class GenerateRequest(ListedSchema):
    """`POST /inference/v1/generate`, vLLM's token-in, token-out route."""

    unserved = fields.GENERATE
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"token_ids": [11, 27, 30, 9], "sampling_params": {"max_tokens": 8, "logprobs": 1}}]
        }
    )

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    token_ids: Ids = Field(min_length=1, description="The prompt.")
    sampling_params: GenerateSampling = Field(default=GenerateSampling(), description="Omitted: the run's.")
    rollout_id: str | None = TURN_OF
    request_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Returned; null: one is made."
    )
    return_token_ids: bool | None = Field(default=None, description="Add `prompt_token_ids`.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        check_stream_options(self.stream_options)
        sampling = self.sampling_params
        sampling.check_fields("sampling_params.")
        sampling.check_rollout(self.rollout_id)
        sampling.check_prompt_logprobs(self.stream, "sampling_params.")
        unskipped = (sampling.model_extra or {}).get("skip_special_tokens") is False
        if unskipped and sampling.stop:
            why = "stop strings are searched in text without special tokens; use stop_token_ids"
            path = "sampling_params.skip_special_tokens"
            raise Refusal(400, f"{path} false with stop is not supported: {why}", path)


class TokenizeRequest(ListedSchema):
    """`POST /tokenize`: a text, or messages as a chat completion renders them."""

    unserved = fields.TOKENIZE
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "What is 15 times 23?"}]})

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    prompt: str | None = Field(default=None, description="A text; or send `messages`.")
    messages: Annotated[list[ChatMessage], STOP] | None = Field(
        default=None, min_length=1, description="Without images."
    )
    tools: Annotated[list[JsonObject], STOP] | None = Field(default=None, description="With `messages`.")
    add_generation_prompt: bool | None = Field(default=None, description="With `messages`; null: true.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="With `messages`.")
    add_special_tokens: bool | None = Field(default=None, description="With `prompt`; null: true, as in vLLM.")
    return_token_strs: bool | None = Field(default=None, description="Add the tokens' own texts.")

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        if (self.prompt is None) == (self.messages is None):
            raise Refusal(400, "send either prompt or messages", "prompt")
        of_messages: dict[str, Any] = {"tools": self.tools, "add_generation_prompt": self.add_generation_prompt}
        of_messages["chat_template_kwargs"] = self.chat_template_kwargs
        for name, value in of_messages.items():
            if self.messages is None and value is not None:
                raise Refusal(400, f"{name} goes with messages, and this is a prompt; remove it", name)
        if self.messages is not None and self.add_special_tokens:
            why = "the chat template writes its special tokens; remove it"
            raise Refusal(400, f"add_special_tokens with messages is not supported: {why}", "add_special_tokens")


class DetokenizeRequest(ListedSchema):
    """`POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [45, 8]}]})

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    tokens: Ids = Field(description="Token ids.")


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
                self._choice(result, result.token_ids, result.logprobs, places_of(result)) for result in answer.results
            ],
            "usage": usage(answer.results),
            "prompt_logprobs": prompt_logprobs(answer.results[0], by_id),
            **self._about(answer),
        }

    async def events(self, source: AsyncIterator[TokenDelta | Answer]) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through. The token ids, concatenated, are the sequence."""
        columns = Columns(self._request.sampling_params.count)
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
            **ending(result, self._sampling),
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


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of equal weight versions, as `[start, end)` of the sampled tokens."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": str(version), "start": place, "end": place + 1})
    return spans


_GenerateBody = Annotated[GenerateRequest, Body(openapi_examples=GENERATE_EXAMPLES)]


class Tokenized(BaseModel):
    """The tokens of a text or of messages."""

    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    tokens: list[int]
    token_strs: list[str] | None = Field(default=None, description="The tokens in the vocabulary's own spelling.")


class Detokenized(BaseModel):
    """The text of tokens, special tokens included."""

    prompt: str


def token_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["tokens"])
    _add_generate(router, service)
    _add_tokenize(router, service)
    return router


def _add_generate(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {"response_model": None, "responses": GENERATE | errors(*FAILURES)}

    @router.post("/inference/v1/generate", summary="Tokens in, tokens out", **said)
    async def generate(
        body: _GenerateBody,
        request: Request,
        x_rollout_id: RolloutHeader = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """vLLM's protocol. `weight_versions` says which weights sampled which tokens."""
        return await _generate(service, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/inference/v1/generate", summary="Tokens as a turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _GenerateBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """The prompt begins with the tokens of an earlier turn, or forks the rollout."""
        return await _generate(service, in_rollout(body, header=x_rollout_id, url=rollout_id), request)


def _add_tokenize(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", summary="Text or messages to tokens", responses=errors(*FAILURES))
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """Messages are rendered as a chat completion renders them."""
        body.check()
        service.chat.check_model(body.model or "default")
        with service.gate.enter():
            tokens = await service.rendered(_tokenizing(service, body))
        tokenizer: Any = service.renderer.tokenizer
        return Tokenized(
            count=len(tokens),
            max_model_len=service.max_model_len or int(tokenizer.model_max_length),
            tokens=tokens,
            token_strs=tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        )

    @router.post("/detokenize", summary="Tokens to text", responses=errors(*FAILURES))
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """Special tokens are in the text."""
        body.check_fields()
        service.chat.check_model(body.model or "default")
        tokenizer: Any = service.renderer.tokenizer
        if outside := [token for token in body.tokens if token >= len(tokenizer)]:
            message = f"tokens: {outside[0]} is not in the vocabulary of {len(tokenizer)} tokens; remove it"
            raise Refusal(400, message, "tokens")
        with service.gate.enter():
            return Detokenized(prompt=await service.rendered(partial(tokenizer.decode, body.tokens)))


def _tokenizing(service: Service, body: TokenizeRequest) -> Callable[[], list[int]]:
    if body.prompt is not None:
        return encoding(service, body.prompt, body.add_special_tokens is not False, "prompt")
    messages = [message.plain() for message in body.messages or ()]
    try:
        check_can_travel(messages)
    except ValueError as error:
        raise Refusal(400, f"messages: {error}", "messages") from error
    if image_parts(messages):
        message = "messages: an image's tokens are counted by the engine; remove the images"
        raise Refusal(400, message, "messages")
    kwargs = template_kwargs(body.chat_template_kwargs)
    service.chat.check_template(kwargs, body.tools or ())
    options = replace(
        service.renderer.options,
        tools=body.tools or [],
        kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return partial(replace(service.renderer, options=options).prompt, messages)


def encoding(service: Service, text: str, add_special_tokens: bool, where: str) -> Callable[[], list[int]]:
    if len(text.encode()) > service.limits.prompt_bytes:
        message = f"{where} is larger than {service.limits.prompt_bytes} bytes, far beyond the model's context"
        raise Refusal(413, f"{message}; shorten it", where)
    tokenizer: Any = service.renderer.tokenizer
    return partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def _generate(
    service: Service, body: GenerateRequest, request: Request, idempotency_key: str | None = None
) -> Response:
    model = body.model or "default"
    service.chat.check_model(model, body.rollout_id)
    body.check()
    sampling = body.sampling_params.sampling(service.config.sampling)
    made = Generated(body, sampling, request_id=body.request_id or secrets.token_hex(16))
    asked = body.sampling_params
    call = TokenCall(
        model, body.token_ids, asked.count, body.stream, body.rollout_id, logprobs=asked.logprobs is not None
    )
    source = service.chat.token_events(call, sampling, Once.of(idempotency_key, body, asked.count))
    return await service.respond(request, source, stream=body.stream, whole=made.whole, events=made.events)
