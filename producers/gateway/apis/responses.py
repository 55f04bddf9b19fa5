"""OpenAI's Responses API onto the same conversation as chat completions: request, answer, events.

    ResponsesRequest ─ chat_call ─▶ ChatCall ─ Chat ─▶ Answer ─ ResponsesAnswer ─▶ response, or events

| of theirs                                   | in the conversation                                     |
|---------------------------------------------|---------------------------------------------------------|
| `instructions`                              | a first message of the system, of this call alone       |
| `previous_response_id`                      | the messages up to that answer (StoredResponses)        |
| a message item                              | a message; one of the assistant begins a turn of it     |
| `function_call` items after it, or alone    | the calls of that turn                                  |
| a `function_call_output` item               | a message of the role `tool`                            |

So an answer's items that are sent back are the message that was kept, and the next call goes on from its tokens.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import ConfigDict, Discriminator, Field, Tag
from redis.asyncio import Redis

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, Message, SamplingParams, TokenDelta
from sluice.producers.gateway.answers import (
    Answer,
    NameToken,
    finish_reason,
    openai_logprobs,
    own_fields,
    texts,
    usage,
)
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.apis.openapi import FAILURES, RESPONSES, RESPONSES_EXAMPLES, errors
from sluice.producers.gateway.apis.requests import (
    SamplingOptions,
    StreamOptions,
    StructuredOutputs,
    check_can_travel,
    in_rollout,
    of_response_format,
    template_kwargs,
)
from sluice.producers.gateway.chat import ChatCall, Once
from sluice.producers.gateway.images import FULL_DETAIL
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
from sluice.producers.gateway.turns import digest, digests
from sluice.producers.http.schemas import MAX_ID_LENGTH, MAX_NAME_LENGTH, MAX_TOKENS_LIMIT, STOP, JsonObject, TokenId
from sluice.producers.http.strict_json import StrictRoute

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")  # the second one adds to reasoning items; there are none


class _Listed(ListedSchema):
    unserved = fields.ITEM

    type: str


class TextPart(_Listed):
    """A text; an assistant's is `output_text`."""

    text: str


class ImagePart(_Listed):
    """A picture by its URL, which may be a data URL."""

    image_url: str
    detail: str | None = Field(default=None, description="`auto`, `high`, or null.")


class OtherPart(_Listed):
    """One that isn't served."""

    model_config = ConfigDict(extra="allow")


_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "input_image": "image"}
_ITEMS = ("message", "function_call", "function_call_output")


def _type(value: Any, default: str = "") -> Any:
    return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)


def _part_kind(value: Any) -> str:
    return _PARTS.get(str(_type(value)), "other")


_TextPart = Annotated[TextPart, Tag("text")]
_ImagePart = Annotated[ImagePart, Tag("image")]
_OtherPart = Annotated[OtherPart, Tag("other")]
_Content = str | Annotated[list[Annotated[_TextPart | _ImagePart | _OtherPart, Discriminator(_part_kind)]], STOP]


class MessageItem(_Listed):
    """A message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class CallItem(_Listed):
    """A call that the model has made."""

    call_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    arguments: str


class OutputItem(_Listed):
    """What a tool answered."""

    call_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    name: str | None = Field(default=None, max_length=MAX_NAME_LENGTH)
    output: _Content


class OtherItem(_Listed):
    """One that isn't served."""

    model_config = ConfigDict(extra="allow")


def _item_kind(value: Any) -> str:
    kind = _type(value, "message")
    return kind if kind in _ITEMS else "other"


_MessageItem = Annotated[MessageItem, Tag("message")]
_CallItem = Annotated[CallItem, Tag("function_call")]
_OutputItem = Annotated[OutputItem, Tag("function_call_output")]
_OtherItem = Annotated[OtherItem, Tag("other")]
Item = Annotated[_MessageItem | _CallItem | _OutputItem | _OtherItem, Discriminator(_item_kind)]


class ResponseTool(ListedSchema):
    """A function that the agent can run."""

    unserved = fields.RESPONSES_TOOL

    type: str
    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_LENGTH)
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="The JSON Schema of its arguments.")
    strict: bool | None = Field(default=None, description="Goes to the chat template; it isn't enforced.")

    def function(self, where: str) -> JsonObject:
        """OpenAI's older form. Raises Refusal (400)."""
        if self.type != "function":
            raise _refused(
                f"{where}.type", f"{self.type!r:.80} is not a function; the gateway runs no tools of its own"
            )
        self.check_fields(f"{where}.")
        if self.name is None:
            raise _refused(f"{where}.name", "is missing; a function needs one")
        sent = self.model_dump(mode="json", include={"name", "description", "parameters", "strict"})
        return {"type": "function", "function": {name: value for name, value in sent.items() if value is not None}}


class ResponseText(ListedSchema):
    """How the text is written."""

    unserved = fields.TEXT

    format: JsonObject | None = Field(default=None, description="`text`, `json_object` or `json_schema`.")


class Reasoning(ListedSchema):
    """How much the model thinks."""

    unserved = fields.REASONING

    effort: str | None = None


class ResponsesRequest(ListedSchema):
    """`POST /v1/responses`, OpenAI's."""

    unserved = fields.RESPONSES
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "default", "input": "What is 15 times 23?", "max_output_tokens": 256}]
        }
    )

    model: str = Field(default="default", description="`default`, or a name that `/v1/models` lists.")
    input: str | Annotated[list[Item], STOP] = Field(description="Text of the user, or items.")
    instructions: str | None = Field(default=None, description="Of the system; not kept for later responses.")
    previous_response_id: str | None = Field(default=None, description="The conversation goes on after that response.")
    store: bool | None = Field(default=None, description="False: no later response can go on from this one.")
    tools: Annotated[list[ResponseTool], STOP] | None = Field(default=None, description="For the chat template.")
    tool_choice: Any = Field(
        default=None,
        description='`"auto"`; `"none"`: calls in the answer stay text; `"required"` or a function: it is calls.',
    )
    include: Annotated[list[str], STOP] | None = Field(default=None, description=f"`{_LOGPROBS}`.")
    metadata: JsonObject | None = Field(default=None, description="Returned.")
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT, description="Null: the run's.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Null: the run's. 0 is greedy.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Null: the run's.")
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="vLLM's. Null: the run's.")
    min_p: float | None = Field(default=None, description="vLLM's. Null: the run's.")
    repetition_penalty: float | None = Field(default=None, description="vLLM's. Null: the run's.")
    presence_penalty: float | None = Field(default=None, description="vLLM's. Null: the run's.")
    frequency_penalty: float | None = Field(default=None, description="vLLM's. Null: the run's.")
    logit_bias: dict[str, float] | None = Field(default=None, description="vLLM's.")
    allowed_token_ids: Annotated[list[TokenId], STOP] | None = Field(default=None, min_length=1, description="vLLM's.")
    bad_words: Annotated[list[str], STOP] | None = Field(default=None, description="vLLM's.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="vLLM's.")
    text: ResponseText | None = Field(default=None, description="Its `format`: what the text must match.")
    reasoning: Reasoning | None = Field(default=None, description="Its `effort`: a variable of the chat template.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="vLLM's: variables of the template.")
    parallel_tool_calls: bool | None = Field(default=None, description="False: the answer has one call at most.")
    stop: str | Annotated[list[str], STOP] | None = Field(
        default=None, description="vLLM's: texts that end the answer."
    )
    stop_token_ids: Annotated[list[TokenId], STOP] | None = Field(default=None, description="vLLM's.")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="vLLM's.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description=f"The likeliest tokens in each entry; with `{_LOGPROBS}`."
    )
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    rollout_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Calls with the same id are the turns of one rollout; or name it in the URL, or in X-Rollout-Id.",
    )

    def _options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            structured_outputs=self.structured_outputs,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
        )

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """These options over the run's. Raises Refusal (400)."""
        form = of_response_format(None if self.text is None else self.text.format, "text.format")
        if form is not None and self.structured_outputs is not None:
            raise _refused("text.format", "structured_outputs is there too; remove one of them")
        sampling = self._options().sampling(default)
        if self.top_logprobs:
            sampling = msgspec.structs.replace(sampling, top_logprobs=self.top_logprobs)
        return sampling if form is None else msgspec.structs.replace(sampling, grammar=form)

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        if self.stream_options is not None:
            self.stream_options.check_fields("stream_options.")
        if self.top_logprobs and not self.wants_logprobs:
            raise _refused("top_logprobs", f"goes with {_LOGPROBS} in include; send it")
        for name in ("text", "reasoning"):
            if (part := getattr(self, name)) is not None:
                part.check_fields(f"{name}.")
        for at, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise _refused(f"include.{at}", f"{name!r:.80} is not supported: it may be {_LOGPROBS}")
        self._options().check_rollout(self.rollout_id)

    @property
    def leading(self) -> int:
        """How many messages of a call are its own and not kept."""
        return int(bool(self.instructions))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the parts of text have them."""
        return _LOGPROBS in (self.include or ())

    def call(self, history: Sequence[Message] = ()) -> ChatCall:
        """What is asked, after the messages that are stored. Raises Refusal (400)."""
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += [*history, *self.messages()]
        tools = [tool.function(f"tools.{at}") for at, tool in enumerate(self.tools or ())]
        return ChatCall(
            model=self.model,
            messages=messages,
            tools=tools,
            stream=self.stream,
            rollout_id=self.rollout_id,
            tool_choice=ToolChoice.of(self.tool_choice, tools, one=self.parallel_tool_calls is False),
            template_kwargs=template_kwargs(self.chat_template_kwargs, self.reasoning and self.reasoning.effort),
            logprobs=self.wants_logprobs,
        )

    def messages(self) -> list[Message]:
        """The input as messages of a chat. Raises Refusal (400)."""
        if isinstance(self.input, str):
            messages: list[Message] = [{"role": "user", "content": self.input}]
        else:
            messages = list(_turns(self.input))
        if not messages:
            raise _refused("input", "is empty; send a text, or an item")
        try:
            check_can_travel(messages)
        except ValueError as error:
            raise Refusal(400, f"input: {error}", "input") from error
        return messages


def _turns(items: Sequence[Any]) -> Iterator[Message]:
    turn: Message | None = None  # of the assistant, to which calls may still belong
    for at, item in enumerate(items):
        where = f"input.{at}"
        if isinstance(item, OtherItem):
            raise _refused(f"{where}.type", f"an item of type {item.type!r:.80} is not served; remove it")
        item.check_fields(f"{where}.")
        if isinstance(item, CallItem):
            turn = turn or {"role": "assistant", "content": None}
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            continue
        if turn is not None:
            yield turn
            turn = None
        if isinstance(item, OutputItem):
            message: Message = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output, where)}
            yield message if item.name is None else {**message, "name": item.name}
        elif item.role == "assistant":
            turn = {"role": "assistant", "content": _content(item.content, where)}
        else:
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _content(item.content, where)}
    if turn is not None:
        yield turn


def _content(content: Any, where: str) -> str | list[JsonObject]:
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for at, part in enumerate(content):
        path = f"{where}.content.{at}"
        if isinstance(part, OtherPart):
            raise _refused(f"{path}.type", f"a part of type {part.type!r:.80} is not served; remove it")
        part.check_fields(f"{path}.")
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
            continue
        if part.detail not in FULL_DETAIL:
            raise _refused(f"{path}.detail", "images are processed as model.preprocess says; remove it")
        parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)


def _refused(path: str, message: str) -> Refusal:
    return Refusal(400, f"{path}: {message}", path)


def items_of(message: Message, name: str, logprobs: Any = ()) -> list[JsonObject]:
    """The output of an answer; `name` makes the items' ids."""
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{name}_{place}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for place, call in enumerate(message.get("tool_calls") or ())
    ]
    text = message.get("content") or ""
    if calls and not text:
        return calls
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    said = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [part]}
    return [said, *calls]


class ResponsesAnswer:
    """The answer to one request, whole or as events."""

    def __init__(self, request: ResponsesRequest, response_id: str, text: TextStream, names: NameToken) -> None:
        """`text` is the one of the stream."""
        self._request, self._id, self._text, self._names = request, response_id, text, names
        self._created, self._number = int(time.time()), -1

    def whole(self, answer: Answer) -> dict[str, Any]:
        """OpenAI's response, with our own fields of a chat completion."""
        [result], [message] = answer.results, answer.messages
        cut = finish_reason(result, message) == "length"
        logprobs = openai_logprobs(result, self._names)["content"] if self._request.wants_logprobs else ()
        counts = usage(answer.results)
        head = self._response(
            "incomplete" if cut else "completed", items_of(message, self._id.removeprefix("resp_"), logprobs)
        )
        return {
            **head,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            **own_fields(answer),
        }

    def _response(self, status: str, output: list[JsonObject]) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": self._request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump(mode="json", exclude_unset=True) for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def events(
        self, source: AsyncIterator[TokenDelta | Answer], store: Callable[[Answer], Awaitable[None]]
    ) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through. The last one has our own fields; `store` comes before."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress", []))
        shows_text = False
        async for one in texts(source, [self._text]):
            if isinstance(one, Answer):
                await store(one)
                for made in self._last(self.whole(one), shows_text=shows_text):
                    yield made
                return
            if not shows_text:
                shows_text = True
                for made in self._begun_text():
                    yield made
            yield self._of_text("response.output_text.delta", delta=one[1], logprobs=[])

    def _begun_text(self) -> Iterator[bytes]:
        [item] = items_of({}, self._id.removeprefix("resp_"))
        begun = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._of_text("response.content_part.added", part=item["content"][0])

    def _last(self, whole: dict[str, Any], *, shows_text: bool) -> Iterator[bytes]:
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                begun = {**item, "status": "in_progress", "arguments": ""}
                about = {"output_index": index, "item_id": item["id"]}
                arguments = item["arguments"]
                yield self._event("response.output_item.added", output_index=index, item=begun)
                yield self._event("response.function_call_arguments.delta", **about, delta=arguments)
                yield self._event(
                    "response.function_call_arguments.done", **about, name=item["name"], arguments=arguments
                )
            else:
                if not shows_text:
                    yield from self._begun_text()
                [part] = item["content"]
                yield self._of_text("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._of_text("response.content_part.done", part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _of_text(self, kind: str, **more: Any) -> bytes:
        return self._event(
            kind, item_id=f"msg_{self._id.removeprefix('resp_')}", output_index=0, content_index=0, **more
        )

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        value = {"type": kind, "sequence_number": self._number, **more}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"

    def error_event(self, refusal: Refusal) -> bytes:
        """The last event of a stream that failed."""
        error = refusal.body()["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])


_NAME = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{24})")
_ROLLOUT = b"rollout"


@dataclass(frozen=True, slots=True)
class History:
    """What a response goes on from; the rollout is None for calls without one."""

    messages: Sequence[Message] = ()
    rollout_id: str | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseName:
    """The two parts of a response's id."""

    conversation: str
    response: str

    def __str__(self) -> str:
        return f"resp_{self.conversation}{self.response}"

    @classmethod
    def made(cls, within: str | None, asked: Any, history: History) -> ResponseName:
        """`within`: the rollout or idempotency key, in which the same request has the same id; None: a new one."""
        if within is None:
            return cls(history.conversation or secrets.token_hex(12), secrets.token_hex(12))
        return cls(digest(within)[:24], digest([within, asked])[:24])


class StoredResponses:
    """The conversations that `previous_response_id` goes on from; in the broker, so any gateway answers the next.

        resp_<conversation><response> ─▶ hash of the conversation: response ─▶ its last message ─▶ the one before ─▶ …

    - A message is stored once, under the digest of all up to it: a conversation costs its length, and a fork its tail.
    - It is stored before the response is answered, and expires `ttl_s` after the conversation's last response.
    - A conversation is a rollout's, and then names it; or one of calls without a rollout.
    """

    def __init__(self, client: Redis, keys: Keys, ttl_s: float) -> None:
        self._client: Any = client
        self._prefix, self._ttl_ms = keys.responses, int(ttl_s * 1000)

    async def history(self, response_id: str) -> History:
        """The messages up to and with that answer. Raises Refusal (400) if it isn't stored."""
        if (found := _NAME.fullmatch(response_id)) is None:
            raise _not_found(response_id)
        stored: dict[bytes, bytes] = await self._client.hgetall(self._prefix + found[1])
        at = stored.get(b"r:" + found[2].encode())
        messages: list[Message] = []
        while at:
            link = stored.pop(b"m:" + at, None)  # each once: a damaged chain may not be a circle
            if link is None:  # the broker has lost a part
                raise _not_found(response_id)
            try:
                at, message = msgspec.msgpack.decode(link, type=tuple[bytes, dict[str, Any]])
            except msgspec.MsgspecError as error:
                key = self._prefix + found[1]
                raise MessageError(f"{response_id}: damaged in the broker ({error}); delete the key {key}") from error
            messages.append(message)
        if not messages:
            raise _not_found(response_id)
        rollout_id = stored.get(_ROLLOUT)
        return History(messages[::-1], None if rollout_id is None else rollout_id.decode(), found[1])

    async def put(self, name: ResponseName, messages: Sequence[Message], rollout_id: str | None) -> None:
        """Keep all messages of a conversation, its answer the last one. Raises RedisError."""
        places = [b"", *(place.encode() for place in digests(messages)[1:])]
        fields: dict[bytes, bytes] = {
            b"m:" + place: msgspec.msgpack.encode((places[at], message))
            for at, (place, message) in enumerate(zip(places[1:], messages, strict=True))
        }
        fields[b"r:" + name.response.encode()] = places[-1]
        if rollout_id is not None:
            fields[_ROLLOUT] = rollout_id.encode()
        key = self._prefix + name.conversation
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=fields)
            pipe.pexpire(key, self._ttl_ms)
            await pipe.execute()


def _not_found(response_id: str) -> Refusal:
    message = (
        f"previous_response_id: {response_id:.80} is not stored: it had store: false, or it is older than "
        "gateway.rollout_ttl_s; send the whole conversation as input"
    )
    return Refusal(400, message, "previous_response_id", code="previous_response_not_found")


_ResponsesBody = Annotated[ResponsesRequest, Body(openapi_examples=RESPONSES_EXAMPLES)]


def response_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["agents"])
    stored = StoredResponses(service.client, service.keys, service.config.gateway.rollout_ttl_s)
    said: dict[str, Any] = {"response_model": None, "responses": RESPONSES | errors(*FAILURES)}

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
        return await _respond(service, stored, in_rollout(body, header=x_rollout_id), request, idempotency_key)

    @router.post(f"{SCOPE}/v1/responses", summary="OpenAI's responses: the next turn of the rollout in the URL", **said)
    async def turn(
        rollout_id: RolloutPath, body: _ResponsesBody, request: Request, x_rollout_id: RolloutHeader = None
    ) -> Response:
        """For agents whose only setting is the base URL: `{gateway}/rollouts/{rollout_id}/v1`."""
        return await _respond(service, stored, in_rollout(body, header=x_rollout_id, url=rollout_id), request)

    return router


async def _respond(
    service: Service,
    stored: StoredResponses,
    body: ResponsesRequest,
    request: Request,
    idempotency_key: str | None = None,
) -> Response:
    body.check()
    history = History()
    if body.previous_response_id is not None:
        history = await stored.history(body.previous_response_id)
        body = in_rollout(body, conversation=history.rollout_id)
    service.chat.check_model(body.model, body.rollout_id)
    call, sampling = body.call(history.messages), body.sampling(service.config.sampling)
    forced = service.chat.constrained(call, sampling)
    asked = [call.messages, call.tools, call.template_kwargs, msgspec.to_builtins(forced)]
    name = ResponseName.made(call.rollout_id or idempotency_key, asked, history)
    made = ResponsesAnswer(body, str(name), service.text_stream(call, sampling), service.token_names)
    once = Once.of(idempotency_key, body, 1)

    async def store(answer: Answer) -> None:
        if body.store is not False:
            kept = [*answer.asked[body.leading :], answer.messages[0]]
            await stored.put(name, kept, call.rollout_id)

    return await service.respond(
        request,
        service.chat.events(call, sampling, once),
        stream=body.stream,
        whole=made.whole,
        events=partial(made.events, store=store),
        keep=store,
        error=made.error_event,
    )
