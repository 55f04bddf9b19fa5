"""`/v1/chat/completions`, `/v1/models` and `/infer/`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from pipeline.errors import MessageError
from pipeline.messages import TokenDelta
from producers.gateway.answers import Answer
from producers.gateway.in_hand import unless_gone
from producers.gateway.infer import encode_envelopes, read_call
from producers.gateway.refusals import Problem, Refusal
from producers.gateway.requests import ChatRequest
from producers.gateway.service import Service
from producers.gateway.stream import ChatStream, with_error
from producers.rollout.schemas.completions import CompletionsResponse

JSON = "application/json"
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "It cannot be honoured; the message says why."},
    401: {"model": Problem, "description": "The key is missing or wrong."},
    404: {"model": Problem, "description": "No such model or rollout."},
    409: {"model": Problem, "description": "The rollout is closed."},
    413: {"model": Problem, "description": "The body is too large."},
    422: {"model": Problem, "description": "Not the schema; `param` is the path."},
    429: {"model": Problem, "description": "Too many requests in hand; `Retry-After` says when to come again."},
    500: {"model": Problem, "description": "The sequence died in the queue, or a fault of the gateway."},
    503: {"model": Problem, "description": "The broker is away."},
    504: {"model": Problem, "description": "No answer in time; the message says what was waited for."},
}
_INFER_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["infer_requests"],
                    "properties": {
                        "infer_requests": {"type": "array", "items": {"type": "object"}},
                        "request_config": {"type": ["object", "null"]},
                    },
                },
                "example": {
                    "infer_requests": [{"messages": [{"role": "user", "content": "Hello"}]}],
                    "request_config": {"max_tokens": 32, "temperature": 0},
                },
            }
        },
    }
}


class Model(BaseModel):
    """One name that requests may use."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "sluice"


class Models(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[Model]


class _Events(StreamingResponse):
    """A stream that gives back what it holds, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


def chat_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(tags=["completions"], responses=ERRORS)
    names = ("default", service.config.gateway.model_name)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        summary="A chat completion, or the next turn of a rollout",
        responses={200: {"model": CompletionsResponse, "description": "An event stream where `stream` is true."}},
    )
    async def chat(body: ChatRequest, request: Request, x_rollout_id: str | None = Header(default=None)) -> Response:
        """OpenAI's protocol. Calls with one `rollout_id` (or header `X-Rollout-Id`) are turns of one rollout."""
        if body.rollout_id is None and x_rollout_id is not None:
            body = body.model_copy(update={"rollout_id": x_rollout_id})
        return await _chat(service, body, request)

    @router.post("/infer/", response_model=None, summary="A batch of prompts", openapi_extra=_INFER_BODY)
    async def infer(request: Request) -> Response:
        """One envelope for each output, in the order of the prompts."""
        try:
            call = read_call(await request.body())
        except MessageError as error:
            raise Refusal(422, str(error)) from error
        with service.gate.enter(len(call.infer_requests)):
            envelopes = await unless_gone(request, service.inference.answer(call))
        return Response(encode_envelopes(envelopes), media_type=JSON)

    @router.get("/v1/models", summary="Names of the model")
    async def models() -> Models:
        """Every name means the weights that are served at the time."""
        return Models(data=[Model(id=name) for name in names])

    @router.get("/v1/models/{name}", summary="One name of the model")
    async def model(name: str) -> Model:
        """404 for another name."""
        if name not in names:
            raise Refusal(404, f"model {name!r:.80} is not served; it may be {' or '.join(names)}", "model")
        return Model(id=name)

    return router


async def _chat(service: Service, body: ChatRequest, request: Request) -> Response:
    sampling = service.chat.check(body)
    async with AsyncExitStack() as held:
        held.enter_context(service.gate.enter())
        source = await held.enter_async_context(aclosing(service.chat.events(body, sampling)))
        first = await unless_gone(request, anext(source))  # what is refused is refused before the first byte
        if isinstance(first, Answer) and not body.stream:
            _count(service, first)
            whole = first.completion(logprobs=bool(body.logprobs))
            return Response(msgspec.json.encode(whole), media_type=JSON)
        marker = getattr(service.chat.parser, "marker", "") if body.parses_tools else None
        stream = ChatStream(body, stop=sampling.stop, decode=service.decode, marker=marker, name=secrets.token_hex(12))
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
