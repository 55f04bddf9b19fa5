"""`/v1/chat/completions`, `/v1/models`, `/infer/`, and how a caller ends a rollout."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from sluice.pipeline.errors import MessageError, RequestError
from sluice.pipeline.wire.messages import TokenDelta
from sluice.producers.gateway.completion import Answer, ChatStream, by_id, with_error
from sluice.producers.gateway.infer import encode_envelopes, read_call
from sluice.producers.gateway.openapi import CHAT, CHAT_EXAMPLES, INFER, INFER_BODY, errors
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.requests import ChatRequest, FinishRequest
from sluice.producers.gateway.service import Service, unless_gone
from sluice.producers.gateway.trajectory import Verdict
from sluice.producers.http.schemas import ROLLOUT_ID, RolloutResponse
from sluice.producers.http.strict_json import StrictRoute

JSON = "application/json"


class Model(BaseModel):
    """One name that requests may use."""

    id: str = Field(description="Valid values for `model` in a request.")
    object: str = "model"
    created: int = 0
    owned_by: str = "sluice"


class Models(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[Model]


_ChatBody = Annotated[ChatRequest, Body(openapi_examples=CHAT_EXAMPLES)]
_RolloutHeader = Annotated[str | None, Header(description="Instead of `rollout_id` in the body.")]


class _Events(StreamingResponse):
    """A stream that releases its resources however it ends."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


def chat_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["completions"])
    _add_chat(router, service)
    _add_infer(router, service)
    _add_models(router, ("default", service.config.gateway.model_name))
    return router


def _add_chat(router: APIRouter, service: Service) -> None:
    @router.post(
        "/v1/chat/completions",
        response_model=None,
        summary="A chat completion, or the next turn of a rollout",
        responses=CHAT | errors(400, 401, 404, 409, 413, 422, 429, 500, 503, 504, 507),
    )
    async def chat(body: _ChatBody, request: Request, x_rollout_id: _RolloutHeader = None) -> Response:
        """OpenAI's protocol, with the token ids of the prompt and the sampled tokens.

        Calls with the same `rollout_id` are the turns of one rollout: each call's messages begin with those of an
        earlier one and its answer. Other messages fork it. A repeated call gets the same answer.

        Every field is served or refused by name with 400: OpenAI's and vLLM's that are not listed, such as
        `response_format`, may have the value that changes nothing.
        """
        if body.rollout_id is None and x_rollout_id is not None:
            body = body.model_copy(update={"rollout_id": x_rollout_id})
        return await _chat(service, body, request)


def _add_infer(router: APIRouter, service: Service) -> None:
    @router.post(
        "/infer/",
        response_model=None,
        summary="A batch of prompts with one set of options",
        openapi_extra=INFER_BODY,
        responses=INFER | errors(400, 401, 413, 422, 429, 500, 503, 504, 507),
    )
    async def infer(request: Request) -> Response:
        """One chat completion for each output, in the order of the prompts, each in an envelope.

        `coordexp.repeat_terminate_triggered` is 1 if the repeat guard ended the sequence.
        """
        try:
            call = read_call(await request.body(), service.limits)
        except MessageError as error:
            raise Refusal(422, str(error)) from error
        except RequestError as error:
            raise Refusal(413, str(error)) from error
        with service.gate.enter(len(call.infer_requests)):
            envelopes = await unless_gone(request, service.inference.answer(call))
        return Response(encode_envelopes(envelopes), media_type=JSON)


def _add_models(router: APIRouter, names: Sequence[str]) -> None:
    @router.get("/v1/models", summary="Names of the model", response_description="All of them.", responses=errors(401))
    async def models() -> Models:
        """Every name means the weights being served at the time."""
        return Models(data=[Model(id=name) for name in names])

    @router.get(
        "/v1/models/{name}",
        summary="One name of the model",
        response_description="The name is served.",
        responses=errors(401, 404, 422),
    )
    async def model(
        name: Annotated[str, Path(description="As in `model` of a request.", examples=["default"])],
    ) -> Model:
        """For clients that check whether a name is served."""
        if name not in names:
            raise Refusal(404, f"model {name!r:.80} is not served; it may be {' or '.join(names)}", "model")
        return Model(id=name)


async def _chat(service: Service, body: ChatRequest, request: Request) -> Response:
    sampling = service.chat.check(body)
    names = None if not body.logprobs else by_id if body.return_tokens_as_token_ids else service.token_names
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        source = await held.enter_async_context(aclosing(service.chat.events(body, sampling)))
        first = await unless_gone(request, anext(source))  # refusals come before the first byte
        if isinstance(first, Answer) and not body.stream:
            _count(service, first)
            whole = first.completion(logprobs=names)
            return Response(msgspec.json.encode(whole), media_type=JSON)
        marker = getattr(service.chat.parser, "marker", "") if body.parses_tools else None
        stream = ChatStream(
            body,
            stop=sampling.stop,
            decode=service.decode,
            marker=marker,
            name=secrets.token_hex(12),
            logprobs=names,
        )
        events = with_error(stream.events(_from(service, first, source)))
        return _Events(events, held.pop_all())
    raise AssertionError("unreachable")


async def _from(
    service: Service, first: TokenDelta | Answer, rest: AsyncGenerator[TokenDelta | Answer]
) -> AsyncIterator[TokenDelta | Answer]:
    one: TokenDelta | Answer | None = first
    while one is not None:
        if isinstance(one, Answer):
            _count(service, one)
        yield one
        one = await anext(rest, None)


def _count(service: Service, answer: Answer) -> None:
    service.metrics.tokens.labels("prompt").inc(len(answer.results[0].prompt_token_ids))
    service.metrics.tokens.labels("completion").inc(sum(len(result.token_ids) for result in answer.results))


_ROLLOUT_ID = Path(description="As in the calls; may contain slashes.", examples=["r-1"])


class Finished(BaseModel):
    """What happened to the rollout."""

    rollout_id: str
    already: bool = Field(description="An earlier call, or the rollout's time to live, had already ended it.")
    outcome: str | None = Field(default=None, description="`published` or `dropped`.")
    reason: str | None = Field(default=None, description="Why it was dropped.")
    num_turns: int | None = Field(default=None, description="Number of calls in it.")
    parts: int | None = Field(default=None, description="Training sequences; more than one if it forked.")


def rollout_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["rollouts"], responses=errors(400, 401, 404, 413, 422, 500, 503))
    said: dict[str, Any] = {"response_description": Finished.__doc__, "response_model_exclude_none": True}

    @router.post(f"/v1/rollout/{ROLLOUT_ID}/finish", summary="End a rollout", **said)
    async def finish(rollout_id: Annotated[str, _ROLLOUT_ID], body: FinishRequest) -> Finished:
        """COMPLETED publishes its tokens for training, once; ERROR and CANCELLED drop them. May be repeated."""
        body.check_fields()
        verdict = Verdict(final_status=body.final_status, reward=body.reward, truth=body.truth)
        return await _end(rollout_id, verdict)

    @router.post("/v1/rollout/completed", summary="A rollout server's callback", **said)
    async def completed(body: RolloutResponse) -> Finished:
        """The callback after `POST /v1/rollout/init` at a rollout server; ends the rollout as `finish` does."""
        return await _end(body.rollout_id, Verdict(final_status=body.status.value))

    async def _end(rollout_id: str, verdict: Verdict) -> Finished:
        return Finished(**await service.closing.finish(rollout_id, verdict))

    return router
