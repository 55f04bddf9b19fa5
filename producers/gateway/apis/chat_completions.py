"""`/v1/chat/completions`, OpenAI's, whole or as events, and `/v1/models`.

data: {role} ─ data: {content} … ─ data: {tool_calls} ─ data: {finish_reason, token_ids, …} ─ data: {usage} ─ [DONE]
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Request, Response
from pydantic import BaseModel, Field

from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, Message, TokenDelta
from sluice.producers.gateway.answers import (
    DONE,
    Answer,
    NameToken,
    by_id,
    event,
    texts,
    usage,
)
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.openapi import CHAT, CHAT_EXAMPLES, FAILURES, errors
from sluice.producers.gateway.apis.requests import (
    ChatMessage,
    FormattedOptions,
    StreamOptions,
    check_can_travel,
    in_rollout,
    template_kwargs,
)
from sluice.producers.gateway.chat import ChatCall, Once
from sluice.producers.gateway.parsers import ToolChoice
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.service import (
    SCOPE,
    IdempotencyKey,
    RolloutHeader,
    RolloutPath,
    Service,
)
from sluice.producers.gateway.text_stream import TextStream
from sluice.producers.http.schemas import (
    MAX_ID_LENGTH,
    MAX_TOKENS_LIMIT,
    ROLLOUT_ID,
    STOP,
    CompletionsRequest,
    JsonObject,
)
from sluice.producers.http.strict_json import StrictRoute


class ChatRequest(FormattedOptions, CompletionsRequest):  # type: ignore[misc]
    """`POST /v1/chat/completions`. Omitted or null fields use the run's settings."""

    unserved = fields.CHAT

    messages: Annotated[list[ChatMessage], STOP] = Field(  # type: ignore[assignment]
        min_length=1, description="The whole conversation so far. The role `developer` is that of `system`."
    )
    rollout_id: str | None = Field(  # type: ignore[assignment]
        default=None,
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Calls with the same id are the turns of one rollout, whose tokens become one training sequence.",
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS_LIMIT, description="OpenAI's newer name for `max_tokens`; takes precedence."
    )
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    logprobs: bool | None = Field(  # type: ignore[assignment]
        default=None,
        description="Compute them: in OpenAI's form for each choice, and at the top level, where a rollout's turns "
        "always have them.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description="The likeliest tokens in each entry of `logprobs`."
    )
    return_token_ids: bool | None = Field(
        default=None, description="vLLM's; the ids of the prompt and the answer are always there."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of `logprobs` `token_id:N` instead of by their text."
    )
    tool_choice: Any = Field(
        default=None,
        description='`"auto"`; `"none"`: calls in the answer stay text; `"required"` or a function: it is calls.',
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: the answer has one call at most.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="Variables of the chat template.")
    reasoning_effort: str | None = Field(default=None, description="A variable of the chat template.")

    def call(self) -> ChatCall:
        """What is asked. Raises Refusal (400) for values the queue can't carry."""
        return ChatCall(
            self.model,
            self.plain_messages(),
            self.tools or (),
            self.response_mask,
            self.count,
            self.stream,
            self.rollout_id,
            ToolChoice.of(self.tool_choice, self.tools or (), one=self.parallel_tool_calls is False),
            template_kwargs(self.chat_template_kwargs, self.reasoning_effort),
            bool(self.logprobs),
        )

    def plain_messages(self) -> list[Message]:
        """The messages as they came. Raises Refusal (400) for values the queue can't carry."""
        try:
            messages = [message.plain() for message in self.messages]
            check_can_travel(messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from error
        return messages

    @property
    def most_tokens(self) -> int | None:
        """The newer name takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As `top_logprobs` says."""
        return self.top_logprobs or None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises Refusal (400) for unsupported options."""
        self.check_fields()
        if self.stream_options is not None:
            self.stream_options.check_fields("stream_options.")
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs goes with logprobs: true; send it", "top_logprobs")
        self.check_prompt_logprobs(self.stream)
        self.check_rollout(self.rollout_id)


class Chunks:
    """The answer in pieces, each as plain values."""

    def __init__(self, model: str, created: int, completion_id: str) -> None:
        self._head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def delta(self, index: int, **delta: Any) -> dict[str, Any]:
        """A piece of one choice."""
        return {**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}

    def last(self, answer: Answer, *, logprobs: NameToken | None) -> Iterator[dict[str, Any]]:
        """How each choice ended, with its ids; the first one also has the answer's own fields."""
        whole = answer.completion(logprobs=logprobs)
        for choice in whole["choices"]:
            kept = {key: value for key, value in choice.items() if key != "message"}
            chunk = {**self._head, "choices": [{**kept, "delta": {}}]}
            if choice["index"] == 0:
                names = ("system_fingerprint", "prompt_token_ids", "token_ids", "logprobs", "rollout")
                chunk |= {name: whole[name] for name in names if name in whole}
            yield chunk

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Token counts of all choices."""
        return {**self._head, "choices": [], "usage": usage(answer.results)}


def tool_call_deltas(message: Message) -> list[dict[str, Any]]:
    """A message's calls in streaming format: numbered."""
    return [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]


class ChatStream:
    """The events of one streamed answer."""

    def __init__(
        self,
        request: ChatRequest,
        *,
        stop: Sequence[str],
        decode: TextDecoder,
        marker: str | None,
        name: str,
        logprobs: NameToken | None = None,
    ) -> None:
        self._request, self._logprobs = request, logprobs
        self._chunks = Chunks(request.model, int(time.time()), f"chatcmpl-{name}")
        self._texts = [TextStream(decode, stop, marker) for _ in range(request.count)]

    async def events(self, source: AsyncIterator[TokenDelta | Answer]) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through."""
        for index in range(len(self._texts)):
            yield event(self._chunks.delta(index, role="assistant", content=""))
        thoughts: list[dict[str, Any]] = []
        async for one in texts(self._thinking(source, thoughts), self._texts):
            while thoughts:  # before the text that follows them
                yield event(thoughts.pop(0))
            if isinstance(one, Answer):
                for chunk in self._end(one):
                    yield event(chunk)
            else:
                yield event(self._chunks.delta(one[0], content=one[1]))
        yield DONE

    async def _thinking(
        self, source: AsyncIterator[TokenDelta | Answer], thoughts: list[dict[str, Any]]
    ) -> AsyncIterator[TokenDelta | Answer]:
        """The same; the answer's reasoning is put into `thoughts`."""
        async for one in source:
            if isinstance(one, Answer):
                for index, message in enumerate(one.messages):
                    if thought := message.get("reasoning"):
                        thoughts.append(self._chunks.delta(index, reasoning=thought))
            yield one

    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index, message in enumerate(answer.messages):
            if calls := tool_call_deltas(message):
                yield self._chunks.delta(index, tool_calls=calls)
        yield from self._chunks.last(answer, logprobs=self._logprobs)
        if self._request.wants_usage:
            yield self._chunks.usage(answer)


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
_ModelName = Annotated[str, Path(description="As in `model` of a request.", examples=["default"])]


def chat_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["completions"])
    _add_chat(router, service)
    _add_models(router, service)
    return router


def _add_chat(router: APIRouter, service: Service) -> None:
    said: dict[str, Any] = {
        "response_model": None,
        "responses": CHAT | errors(*FAILURES),
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

    @router.get("/v1/models/{name:any}", summary="One name of the model", **one_of_them)
    async def model(name: _ModelName) -> Model:
        """For clients that check whether a name is served."""
        return named(name)

    of_rollout = f"{SCOPE}/v1/models/{{name:any}}"

    @router.get(of_rollout, summary="One name of the model, under a rollout's URL", **one_of_them)
    async def model_of_rollout(rollout_id: RolloutPath, name: _ModelName) -> Model:
        """The same for every rollout, open or not."""
        return named(name)


async def _chat(service: Service, body: ChatRequest, request: Request, idempotency_key: str | None = None) -> Response:
    service.chat.check_model(body.model, body.rollout_id)
    body.check()
    sampling = body.sampling(service.config.sampling)
    call = body.call()
    once = Once.of(idempotency_key, body, body.count)
    names = None if not body.logprobs else by_id if body.return_tokens_as_token_ids else service.token_names
    streamed = ChatStream(
        body,
        stop=sampling.stop,
        decode=service.decode,
        marker=service.chat.marker(call),
        name=secrets.token_hex(12),
        logprobs=names,
    )
    return await service.respond(
        request,
        service.chat.events(call, sampling, once),
        stream=body.stream,
        whole=lambda answer: answer.completion(logprobs=names, names=service.token_names),
        events=streamed.events,
    )
