"""`/v1/completions`, vLLM's `/inference/v1/generate`, `/tokenize` and `/detokenize`, plain or under a rollout's URL."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, Field

from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.wire.messages import SamplingParams
from sluice.producers.gateway.chat import Once
from sluice.producers.gateway.completion import Answer, with_error
from sluice.producers.gateway.openapi import COMPLETION_EXAMPLES, COMPLETIONS, GENERATE, GENERATE_EXAMPLES, errors
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.requests import TokenCall, check_can_travel, template_kwargs
from sluice.producers.gateway.routes import (
    JSON,
    SCOPE,
    Events,
    IdempotencyKey,
    RolloutHeader,
    RolloutPath,
    count_tokens,
    counted,
    in_rollout,
)
from sluice.producers.gateway.service import Service, unless_gone
from sluice.producers.gateway.token_answers import Completions, Generated
from sluice.producers.gateway.token_requests import (
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from sluice.producers.http.strict_json import StrictRoute

_CompletionBody = Annotated[CompletionRequest, Body(openapi_examples=COMPLETION_EXAMPLES)]
_GenerateBody = Annotated[GenerateRequest, Body(openapi_examples=GENERATE_EXAMPLES)]
_FAILURES = (400, 401, 404, 409, 413, 422, 429, 500, 503, 504, 507)


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
    _add_completions(router, service)
    _add_generate(router, service)
    _add_tokenize(router, service)
    return router


def _add_completions(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {"response_model": None, "responses": COMPLETIONS | errors(*_FAILURES)}

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


def _add_generate(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {"response_model": None, "responses": GENERATE | errors(*_FAILURES)}

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
    @router.post("/tokenize", summary="Text or messages to tokens", responses=errors(*_FAILURES))
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """Messages are rendered as a chat completion renders them."""
        body.check()
        service.chat.check_model(body.model or "default")
        with service.gate.enter():
            tokens = await _beside(service, _tokenizing(service, body))
        tokenizer: Any = service.renderer.tokenizer
        return Tokenized(
            count=len(tokens),
            max_model_len=service.max_model_len or int(tokenizer.model_max_length),
            tokens=tokens,
            token_strs=tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        )

    @router.post("/detokenize", summary="Tokens to text", responses=errors(*_FAILURES))
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """Special tokens are in the text."""
        body.check_fields()
        service.chat.check_model(body.model or "default")
        tokenizer: Any = service.renderer.tokenizer
        if outside := [token for token in body.tokens if token >= len(tokenizer)]:
            message = f"tokens: {outside[0]} is not in the vocabulary of {len(tokenizer)} tokens; remove it"
            raise Refusal(400, message, "tokens")
        with service.gate.enter():
            return Detokenized(prompt=await _beside(service, partial(tokenizer.decode, body.tokens)))


def _tokenizing(service: Service, body: TokenizeRequest) -> Callable[[], list[int]]:
    if body.prompt is not None:
        return _encoding(service, body.prompt, body.add_special_tokens is not False, "prompt")
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


def _encoding(service: Service, text: str, add_special_tokens: bool, where: str) -> Callable[[], list[int]]:
    if len(text.encode()) > service.limits.prompt_bytes:
        message = f"{where} is larger than {service.limits.prompt_bytes} bytes, far beyond the model's context"
        raise Refusal(413, f"{message}; shorten it", where)
    tokenizer: Any = service.renderer.tokenizer
    return partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def _beside(service: Service, work: Callable[[], Any]) -> Any:
    until = time.monotonic() + service.config.gateway.request_timeout_s
    return await service.chat.beside(work, until, "rendering the prompt")


async def _calls(service: Service, body: CompletionRequest) -> list[TokenCall]:
    calls: list[TokenCall] = []
    for prompt in body.prompts:
        special = body.add_special_tokens is not False
        if isinstance(prompt, str):
            token_ids: list[int] = await _beside(service, _encoding(service, prompt, special, "prompt"))
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
            once = _once(idempotency_key, body)
            source = await held.enter_async_context(aclosing(service.chat.token_events(calls[0], sampling, once)))
            first = await unless_gone(request, anext(source))  # refusals come before the first byte
            events = with_error(made.events(counted(service, first, source), calls[0].token_ids))
            return Events(events, held.pop_all())
        work = _all_answers(service, calls, sampling, partial(_once, idempotency_key, body))
        answers = await unless_gone(request, work)
    for answer in answers:
        count_tokens(service, answer)
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
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        events = service.chat.token_events(call, sampling, _once(idempotency_key, body))
        source = await held.enter_async_context(aclosing(events))
        first = await unless_gone(request, anext(source))  # refusals come before the first byte
        if isinstance(first, Answer) and not body.stream:
            count_tokens(service, first)
            return Response(msgspec.json.encode(made.whole(first)), media_type=JSON)
        return Events(with_error(made.events(counted(service, first, source))), held.pop_all())


def _once(key: str | None, body: CompletionRequest | GenerateRequest, place: int = 0) -> Once | None:
    if key is None:
        return None
    count = body.count if isinstance(body, CompletionRequest) else body.sampling_params.count
    return Once.of(key, body, count, place)
