"""Anthropic's messages and OpenAI's responses, for agents that don't speak chat completions; also under a rollout."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, Field

from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.wire.messages import SamplingParams
from sluice.producers.gateway import messages_api
from sluice.producers.gateway.chat import Once
from sluice.producers.gateway.completion import Answer, TextStream, with_error
from sluice.producers.gateway.messages_api import CountRequest, MessagesAnswer, MessagesRequest
from sluice.producers.gateway.openapi import (
    MESSAGES,
    MESSAGES_EXAMPLES,
    RESPONSES,
    RESPONSES_EXAMPLES,
    errors,
    messages_errors,
)
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.requests import ChatCall
from sluice.producers.gateway.responses_api import ResponsesAnswer, ResponsesRequest
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
from sluice.producers.gateway.stored_responses import History, ResponseName
from sluice.producers.http.strict_json import StrictRoute

MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_MessagesBody = Annotated[MessagesRequest, Body(openapi_examples=MESSAGES_EXAMPLES)]
_ResponsesBody = Annotated[ResponsesRequest, Body(openapi_examples=RESPONSES_EXAMPLES)]
_FAILURES = (400, 401, 404, 409, 413, 422, 429, 500, 503, 504, 507)


class Counted(BaseModel):
    """The tokens of a conversation."""

    input_tokens: int = Field(description="As the chat template renders it.")


def agent_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["agents"])
    _add_messages(router, service)
    _add_responses(router, service)
    return router


def _add_messages(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {"response_model": None, "responses": MESSAGES | messages_errors(*_FAILURES)}

    @router.post("/v1/messages", summary="Anthropic's API: a message, or the next turn of a rollout", **said)
    async def messages(
        body: _MessagesBody,
        request: Request,
        x_rollout_id: RolloutHeader = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """The conversation of a chat completion, in the form of Anthropic's clients. Errors have their form too."""
        return await _message(service, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/v1/messages", summary="Anthropic's API: the next turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _MessagesBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """For agents whose only setting is the base URL: `{gateway}/rollouts/{rollout_id}`."""
        return await _message(service, in_rollout(body, header=x_rollout_id, url=rollout_id), request)

    @router.post("/v1/messages/count_tokens", summary="Tokens of a conversation", responses=messages_errors(*_FAILURES))
    async def count(body: CountRequest) -> Counted:
        """Nothing is decoded."""
        return await _count(service, body)

    @router.post(
        f"{SCOPE}/v1/messages/count_tokens",
        summary="Tokens of a conversation, under a rollout's URL",
        responses=messages_errors(*_FAILURES),
    )
    async def count_of_rollout(rollout_id: RolloutPath, body: CountRequest) -> Counted:
        """The same for every rollout, open or not."""
        return await _count(service, body)


async def _message(
    service: Service, body: MessagesRequest, request: Request, idempotency_key: str | None = None
) -> Response:
    service.chat.check_model(body.model, body.rollout_id)
    call = body.call()
    sampling = body.sampling(service.config.sampling)
    made = MessagesAnswer(body, sampling, text_stream(service, call, sampling))
    once = None if idempotency_key is None else Once.of(idempotency_key, body, 1)
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        source = await held.enter_async_context(aclosing(service.chat.events(call, sampling, once)))
        first = await unless_gone(request, anext(source))  # refusals come before the first byte
        if isinstance(first, Answer) and not body.stream:
            count_tokens(service, first)
            return Response(msgspec.json.encode(made.whole(first)), media_type=JSON)
        events = with_error(made.events(counted(service, first, source)), messages_api.error_event)
        return Events(events, held.pop_all())
    raise AssertionError("unreachable")


def _add_responses(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {"response_model": None, "responses": RESPONSES | errors(*_FAILURES)}

    @router.post("/v1/responses", summary="OpenAI's responses: one, or the next turn of a rollout", **said)
    async def responses(
        body: _ResponsesBody,
        request: Request,
        x_rollout_id: RolloutHeader = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """The conversation of a chat completion as items. It is stored, unless `store` is false, for later responses.

        A response that goes on from one of a rollout is that rollout's next turn.
        """
        return await _respond(service, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/v1/responses", summary="OpenAI's responses: the next turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _ResponsesBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """For agents whose only setting is the base URL: `{gateway}/rollouts/{rollout_id}/v1`."""
        return await _respond(service, in_rollout(body, header=x_rollout_id, url=rollout_id), request)


async def _respond(
    service: Service, body: ResponsesRequest, request: Request, idempotency_key: str | None = None
) -> Response:
    service.chat.check_model(body.model)
    body.check()
    history = History()
    if body.previous_response_id is not None:
        history = await service.responses.history(body.previous_response_id)
        body = in_rollout(body, conversation=history.rollout_id)
    call, sampling = body.call(history.messages), body.sampling(service.config.sampling)
    asked = [call.messages, call.tools, msgspec.to_builtins(sampling)]
    name = ResponseName.made(call.rollout_id or idempotency_key, asked, history)
    made = ResponsesAnswer(body, str(name), text_stream(service, call, sampling), service.token_names)
    once = None if idempotency_key is None else Once.of(idempotency_key, body, 1)

    async def store(answer: Answer) -> None:
        if body.store is not False:
            kept = [*answer.asked[body.leading :], answer.messages[0]]
            await service.responses.put(name, kept, call.rollout_id)

    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        source = await held.enter_async_context(aclosing(service.chat.events(call, sampling, once)))
        first = await unless_gone(request, anext(source))  # refusals come before the first byte
        if isinstance(first, Answer) and not body.stream:
            count_tokens(service, first)
            await store(first)
            return Response(msgspec.json.encode(made.whole(first)), media_type=JSON)
        events = with_error(made.events(counted(service, first, source), store), made.error_event)
        return Events(events, held.pop_all())
    raise AssertionError("unreachable")


def text_stream(service: Service, call: ChatCall, sampling: SamplingParams) -> TextStream:
    """Of the only answer."""
    return TextStream(service.decode, sampling.stop, service.chat.marker(call))


async def _count(service: Service, body: CountRequest) -> Counted:
    body.check()
    service.chat.check_model(body.model)
    messages = body.conversation()
    if image_parts(messages):
        message = "messages: an image's tokens are counted by the engine; remove the images"
        raise Refusal(400, message, "messages")
    kwargs = body.variables()
    service.chat.check_template(kwargs, body.functions())
    options = replace(service.renderer.options, tools=body.functions(), kwargs=kwargs)
    until = time.monotonic() + service.config.gateway.request_timeout_s
    with service.gate.enter():
        prompt = partial(replace(service.renderer, options=options).prompt, messages)
        return Counted(input_tokens=len(await service.chat.beside(prompt, until, "rendering the prompt")))
