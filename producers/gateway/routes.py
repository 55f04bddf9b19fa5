"""`/v1/chat/completions`, `/v1/models`, `/infer/`, and how a caller ends a rollout."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Body, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from sluice.pipeline.errors import MessageError, RequestError
from sluice.pipeline.wire.messages import TokenDelta
from sluice.producers.gateway.chat import Once
from sluice.producers.gateway.completion import Answer, ChatStream, by_id, with_error
from sluice.producers.gateway.infer import encode_envelopes, read_call
from sluice.producers.gateway.messages_api import MessagesRequest
from sluice.producers.gateway.openapi import CHAT, CHAT_EXAMPLES, INFER, INFER_BODY, errors
from sluice.producers.gateway.refusals import Refusal, closed
from sluice.producers.gateway.requests import ChatRequest, FinishRequest, OpenRequest
from sluice.producers.gateway.responses_api import ResponsesRequest
from sluice.producers.gateway.service import Service, unless_gone
from sluice.producers.gateway.token_requests import CompletionRequest, GenerateRequest
from sluice.producers.gateway.trajectory import Verdict
from sluice.producers.http.schemas import MAX_ID_LENGTH, ROLLOUT_ID, RolloutResponse
from sluice.producers.http.strict_json import StrictRoute

JSON = "application/json"


class Model(BaseModel):
    """One name that requests may use."""

    id: str = Field(description="Valid values for `model` in a request.")
    object: str = "model"
    created: int = 0
    owned_by: str = "sluice"
    max_model_len: int | None = Field(default=None, description="Tokens of prompt and answer together.")


class Models(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[Model]


_ChatBody = Annotated[ChatRequest, Body(openapi_examples=CHAT_EXAMPLES)]
RolloutHeader = Annotated[str | None, Header(description="Instead of `rollout_id` in the body.")]
RolloutPath = Annotated[str, Path(description="Instead of `rollout_id` in the body.", examples=["r-1"])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="A repeated call with the same key gets the same answer. With a `rollout_id` every call does.",
    ),
]
_ModelName = Annotated[str, Path(description="As in `model` of a request.", examples=["default"])]
SCOPE = f"/rollouts/{ROLLOUT_ID}"


class Events(StreamingResponse):
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
    _add_models(router, service)
    return router


def _add_chat(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {
        "response_model": None,
        "responses": CHAT | errors(400, 401, 404, 409, 413, 422, 429, 500, 503, 504, 507),
    }

    @router.post("/v1/chat/completions", summary="A chat completion, or the next turn of a rollout", **said)
    async def chat(
        body: _ChatBody,
        request: Request,
        x_rollout_id: RolloutHeader = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """OpenAI's protocol, with the token ids of the prompt and the sampled tokens.

        Calls with the same `rollout_id` are the turns of one rollout: each call's messages begin with those of an
        earlier one and its answer. Other messages fork it. A repeated call gets the same answer.

        Every field is served or refused by name with 400: OpenAI's and vLLM's that are not listed, such as
        `response_format`, may have the value that changes nothing.
        """
        return await _chat(service, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/v1/chat/completions", summary="The next turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _ChatBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """For agents whose only setting is the base URL: `{gateway}/rollouts/{rollout_id}/v1`."""
        return await _chat(service, in_rollout(body, header=x_rollout_id, url=rollout_id), request)

    @router.post(f"/v1/rollouts/{ROLLOUT_ID}/chat/completions", summary="The same, as Osmosis' SDK has it", **said)
    async def turn_of_agent(rollout_id: RolloutPath, body: _ChatBody, request: Request) -> Response:
        """Its `chat_completions_url` is `{gateway}/v1/rollouts/{rollout_id}`."""
        return await _chat(service, in_rollout(body, url=rollout_id), request)


_RequestT = TypeVar("_RequestT", ChatRequest, CompletionRequest, GenerateRequest, MessagesRequest, ResponsesRequest)


def in_rollout(
    body: _RequestT, *, header: str | None = None, url: str | None = None, conversation: str | None = None
) -> _RequestT:
    """The request with the rollout that its URL, header, body or earlier response names.

    Raises Refusal (400) if they differ.
    """
    named = {name for name in (url, header, body.rollout_id, conversation) if name is not None}
    if len(named) > 1:
        message = "rollout_id: the URL, the header X-Rollout-Id and the body name different rollouts; send one"
        if conversation is not None:
            message = "rollout_id: previous_response_id is of another rollout; send the conversation as input"
        raise Refusal(400, message, "rollout_id")
    return body.model_copy(update={"rollout_id": named.pop()}) if named else body


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


def _add_models(router: APIRouter, service: Service) -> None:
    names, most = service.chat.models, service.max_model_len
    listed = Models(data=[Model(id=name, max_model_len=most) for name in names])
    all_of_them: dict[str, Any] = {"response_description": "All of them.", "responses": errors(401)}
    one_of_them: dict[str, Any] = {"response_description": "The name is served.", "responses": errors(401, 404, 422)}

    @router.get("/v1/models", summary="Names of the model", **all_of_them)
    async def models() -> Models:
        """The first two mean the weights being served at the time; the others are adapters (`worker.adapters`)."""
        return listed

    @router.get(f"{SCOPE}/v1/models", summary="Names of the model, under a rollout's URL", **all_of_them)
    async def models_of_rollout(rollout_id: RolloutPath) -> Models:
        """The same for every rollout, open or not."""
        return listed

    def named(name: str) -> Model:
        service.chat.check_model(name)
        return Model(id=name, max_model_len=most)

    @router.get("/v1/models/{name}", summary="One name of the model", **one_of_them)
    async def model(name: _ModelName) -> Model:
        """For clients that check whether a name is served."""
        return named(name)

    @router.get(f"{SCOPE}/v1/models/{{name}}", summary="One name of the model, under a rollout's URL", **one_of_them)
    async def model_of_rollout(rollout_id: RolloutPath, name: _ModelName) -> Model:
        """The same for every rollout, open or not."""
        return named(name)


async def _chat(service: Service, body: ChatRequest, request: Request, idempotency_key: str | None = None) -> Response:
    service.chat.check_model(body.model, body.rollout_id)
    body.check()
    sampling = body.sampling(service.config.sampling)
    call = body.call()
    once = None if idempotency_key is None else Once.of(idempotency_key, body, body.count)
    names = None if not body.logprobs else by_id if body.return_tokens_as_token_ids else service.token_names
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        source = await held.enter_async_context(aclosing(service.chat.events(call, sampling, once)))
        first = await unless_gone(request, anext(source))  # refusals come before the first byte
        if isinstance(first, Answer) and not body.stream:
            count_tokens(service, first)
            whole = first.completion(logprobs=names, names=service.token_names)
            return Response(msgspec.json.encode(whole), media_type=JSON)
        stream = ChatStream(
            body,
            stop=sampling.stop,
            decode=service.decode,
            marker=service.chat.marker(call),
            name=secrets.token_hex(12),
            logprobs=names,
        )
        events = with_error(stream.events(counted(service, first, source)))
        return Events(events, held.pop_all())
    raise AssertionError("unreachable")


async def counted(
    service: Service, first: TokenDelta | Answer, rest: AsyncGenerator[TokenDelta | Answer]
) -> AsyncIterator[TokenDelta | Answer]:
    """All events of a stream; its tokens are counted when its answer comes."""
    one: TokenDelta | Answer | None = first
    while one is not None:
        if isinstance(one, Answer):
            count_tokens(service, one)
        yield one
        one = await anext(rest, None)


def count_tokens(service: Service, answer: Answer) -> None:
    """For the metrics."""
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


class Opened(BaseModel):
    """The rollout is open."""

    rollout_id: str
    already: bool = Field(description="It was open before; its group and truth are those of then.")
    base_path: str = Field(description="For an agent that takes only a base URL: this path of this server.")


def rollout_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["rollouts"], responses=errors(400, 401, 404, 413, 422, 500, 503))
    said: dict[str, Any] = {"response_description": Finished.__doc__, "response_model_exclude_none": True}

    @router.post(f"/v1/rollout/{ROLLOUT_ID}/finish", summary="End a rollout", **said)
    async def finish(rollout_id: Annotated[str, _ROLLOUT_ID], body: FinishRequest) -> Finished:
        """COMPLETED publishes its tokens for training, once; ERROR and CANCELLED drop them. May be repeated."""
        body.check_fields()
        verdict = Verdict(final_status=body.final_status, reward=body.total, rewards=body.rewards, truth=body.truth)
        return await _end(rollout_id, verdict)

    @router.post("/v1/rollout/completed", summary="A rollout server's callback", **said)
    async def completed(body: RolloutResponse) -> Finished:
        """The callback after `POST /v1/rollout/init` at a rollout server; ends the rollout as `finish` does."""
        return await _end(body.rollout_id, Verdict(final_status=body.status.value, reward=body.reward))

    @router.post(
        "/v1/rollouts",
        summary="Open a rollout",
        response_description=Opened.__doc__ or "",
        responses=errors(409),
    )
    async def opened(body: OpenRequest) -> Opened:
        """Names its group, its place in it, and the truth, before its first call. May be repeated.

        A rollout that isn't opened is a group of one, and opens with its first call.
        """
        rollout_id = secrets.token_hex(16) if body.rollout_id is None else body.rollout_id
        [outcome] = await service.rollouts.open([body.head(rollout_id, service.config)])
        if outcome == "done":
            raise closed(rollout_id)
        service.metrics.rollouts.labels("opened").inc(outcome == "enqueued")
        path = f"/rollouts/{quote(rollout_id, safe='')}/v1"
        return Opened(rollout_id=rollout_id, already=outcome == "duplicate", base_path=path)

    async def _end(rollout_id: str, verdict: Verdict) -> Finished:
        return Finished(**await service.closing.finish(rollout_id, verdict))

    return router
