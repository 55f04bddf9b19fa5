"""Anthropic's Messages API onto the same conversation as chat completions: request, answer, events, errors.

    MessagesRequest ─ chat_call ─▶ ChatCall ─ Chat ─▶ Answer ─ MessagesAnswer ─▶ message, or events

| of theirs                          | in the conversation                                      |
|------------------------------------|----------------------------------------------------------|
| `system`                           | a first message of the system                            |
| a user's `tool_result` blocks      | a message of the role `tool` each, in their order        |
| a user's other blocks, up to those | a user's message                                         |
| an assistant's blocks              | one message: texts joined, `tool_use` blocks as its calls |

So an answer that is sent back is the message that was kept, and the next call goes on from its tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from sluice.pipeline.http.errors import documented
from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.wire.messages import Grammar, Message, SamplingParams, TokenDelta
from sluice.producers.gateway.answers import (
    Answer,
    finish_reason,
    own_fields,
    stop_reason,
    texts,
    usage,
)
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.apis.openapi import ERRORS, FAILURES, MESSAGES, MESSAGES_EXAMPLES
from sluice.producers.gateway.apis.requests import (
    SamplingOptions,
    check_can_travel,
    in_rollout,
    of_response_format,
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
from sluice.producers.http.schemas import MAX_ID_LENGTH, MAX_NAME_LENGTH, MAX_TOKENS_LIMIT, STOP, JsonObject
from sluice.producers.http.strict_json import StrictRoute


class Block(ListedSchema):
    """A part of a message's content."""

    unserved = fields.BLOCK

    type: str


class TextBlock(Block):
    """A text."""

    text: str


class ImageBlock(Block):
    """A picture: `{"type": "base64", "media_type", "data"}` or `{"type": "url", "url"}`."""

    source: JsonObject

    def part(self, where: str) -> JsonObject:
        """OpenAI's part. Raises Refusal (400)."""
        kind = self.source.get("type")
        if kind == "url":
            return {"type": "image_url", "image_url": {"url": self.source.get("url")}}
        if kind == "base64":
            url = f"data:{self.source.get('media_type')};base64,{self.source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        raise _refused(f"{where}.source.type", f"{kind!r:.80} is not base64 or url, and files are not stored")


class ToolUseBlock(Block):
    """A call that the model has made."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    input: JsonObject


class OtherBlock(Block):
    """One that isn't served."""

    model_config = ConfigDict(extra="allow")


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("text", "image", "tool_use", "tool_result") else "other"


def _inner_kind(value: Any) -> str:
    kind = _kind(value)
    return kind if kind in ("text", "image") else "other"


_Text = Annotated[TextBlock, Tag("text")]
_Image = Annotated[ImageBlock, Tag("image")]
_Other = Annotated[OtherBlock, Tag("other")]
_InnerBlock = Annotated[_Text | _Image | _Other, Discriminator(_inner_kind)]


class ToolResultBlock(Block):
    """What a tool answered. `is_error` goes to the chat template, as a field of the tool's message."""

    tool_use_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    content: str | Annotated[list[_InnerBlock], STOP] | None = None
    is_error: bool | None = None


_ToolUse = Annotated[ToolUseBlock, Tag("tool_use")]
_ToolResult = Annotated[ToolResultBlock, Tag("tool_result")]
AnyBlock = Annotated[_Text | _Image | _ToolUse | _ToolResult | _Other, Discriminator(_kind)]


class ApiMessage(ListedSchema):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], STOP]

    def plain(self, where: str) -> Iterator[Message]:
        """OpenAI's messages. Raises Refusal (400)."""
        self.check_fields(f"{where}.")
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "assistant":
            yield _assistant(self.content, f"{where}.content")
        else:
            yield from _asked(self.role, self.content, f"{where}.content")


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    written: list[str] = []
    calls: list[JsonObject] = []
    for at, block in enumerate(blocks):
        if isinstance(block, TextBlock | ToolUseBlock):
            block.check_fields(f"{where}.{at}.")
        if isinstance(block, TextBlock):
            written.append(block.text)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _not_there(block, f"{where}.{at}", "an assistant's message")
    text = "".join(written)
    return {"role": "assistant", "content": text or None, "tool_calls": calls} if calls else _said(text)


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _asked(role: str, blocks: Sequence[Block], where: str) -> Iterator[Message]:
    parts: list[JsonObject] = []
    for at, block in enumerate(blocks):
        path = f"{where}.{at}"
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block, path, f"a message of the {role}"))
            continue
        block.check_fields(f"{path}.")
        if role != "user":
            raise _not_there(block, path, f"a message of the {role}")
        if parts:
            yield {"role": role, "content": _joined(parts)}
            parts = []
        yield _result(block, path)
    if parts or not blocks:
        yield {"role": role, "content": _joined(parts)}


def _result(block: ToolResultBlock, where: str) -> Message:
    content: Any = block.content or ""
    if not isinstance(content, str):
        inner = [_part(one, f"{where}.content.{at}", "a tool's result") for at, one in enumerate(content)]
        content = _joined(inner)
    message: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return message if block.is_error is None else {**message, "is_error": block.is_error}


def _part(block: Block, where: str, place: str) -> JsonObject:
    if not isinstance(block, TextBlock | ImageBlock):
        raise _not_there(block, where, place)
    block.check_fields(f"{where}.")
    return {"type": "text", "text": block.text} if isinstance(block, TextBlock) else block.part(where)


def _joined(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Texts alone are one string, as agents of other APIs send them."""
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _not_there(block: Block, where: str, place: str) -> Refusal:
    return _refused(f"{where}.type", f"a block of type {block.type!r:.80} is not served in {place}; remove it")


def _refused(path: str, message: str) -> Refusal:
    return Refusal(400, f"{path}: {message}", path)


class ApiTool(ListedSchema):
    """A function that the agent can run."""

    unserved = fields.MESSAGES_TOOL

    type: str | None = Field(default=None, description="`custom`, or null.")
    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    description: str | None = None
    input_schema: JsonObject | None = Field(default=None, description="The JSON Schema of its arguments.")
    strict: bool | None = Field(default=None, description="Goes to the chat template; it isn't enforced.")

    def function(self, where: str) -> JsonObject:
        """OpenAI's. Raises Refusal (400)."""
        if self.type not in (None, "custom"):
            why = "is a tool of Anthropic's; describe it as a custom one with its input_schema, and run it yourself"
            raise _refused(f"{where}.type", f"{self.type!r:.80} {why}")
        self.check_fields(f"{where}.")
        if self.input_schema is None:
            raise _refused(f"{where}.input_schema", "is missing; send the JSON Schema of the tool's arguments")
        function: JsonObject = {"name": self.name, "parameters": self.input_schema}
        function |= {} if self.description is None else {"description": self.description}
        function |= {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": function}


class _Conversation(ListedSchema):
    """What a message and a count of its tokens have in common."""

    unserved = fields.MESSAGES

    model: str = Field(description="`default`, or a name that `/v1/models` lists.")
    messages: Annotated[list[ApiMessage], STOP] = Field(min_length=1, description="The whole conversation so far.")
    system: str | Annotated[list[_InnerBlock], STOP] | None = Field(default=None, description="Text, or text blocks.")
    tools: Annotated[list[ApiTool], STOP] | None = Field(default=None, description="For the chat template.")
    tool_choice: JsonObject | None = Field(
        default=None, description='`{"type": "auto"}`, `none`, `any`, or `tool` with a `name`.'
    )
    chat_template_kwargs: JsonObject | None = Field(default=None, description="vLLM's: variables of the template.")
    output_config: JsonObject | None = Field(
        default=None, description="`format`: the JSON schema of the answer; `effort`: a variable of the template."
    )
    output_format: JsonObject | None = Field(default=None, description="The same as `output_config.format`.")

    def conversation(self) -> list[Message]:
        """OpenAI's messages. Raises Refusal (400)."""
        messages: list[Message] = []
        if isinstance(self.system, str):
            messages.append({"role": "system", "content": self.system})
        elif self.system:
            messages += _asked("system", self.system, "system")
        for at, message in enumerate(self.messages):
            messages += message.plain(f"messages.{at}")
        if messages[-1]["role"] == "assistant":
            at = len(self.messages) - 1
            raise _refused(f"messages.{at}.role", "an answer is a message of its own; end with one of the user")
        try:
            check_can_travel(messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from error
        return messages

    def functions(self) -> list[JsonObject]:
        """OpenAI's tools. Raises Refusal (400)."""
        return [tool.function(f"tools.{at}") for at, tool in enumerate(self.tools or ())]

    def choice(self, tools: Sequence[JsonObject]) -> ToolChoice:
        """Raises Refusal (400)."""
        choice = self.tool_choice or {"type": "auto"}
        if unknown := sorted(choice.keys() - {"type", "name", "disable_parallel_tool_use"}):
            raise _refused(f"tool_choice.{unknown[0]:.80}", "is not a field of this request; remove it")
        kind, one = choice.get("type"), choice.get("disable_parallel_tool_use") is True
        if ("name" in choice) != (kind == "tool"):
            raise _refused("tool_choice.name", "goes with the type tool, and belongs there")
        theirs = {"any": "required", "tool": {"type": "function", "name": choice.get("name")}}
        if kind not in ("auto", "none", *theirs):
            raise _refused("tool_choice.type", f"{kind!r:.80} is not one of auto, any, tool, none; correct it")
        return ToolChoice.of(theirs.get(str(kind), kind), tools, one=one)

    def output(self) -> tuple[Grammar | None, str | None]:
        """What the text must match, and the effort. Raises Refusal (400)."""
        config = self.output_config or {}
        if unknown := sorted(config.keys() - {"format", "effort"}):
            raise _refused(f"output_config.{unknown[0]:.80}", "is not a field of this request; remove it")
        forms = [(config.get("format"), "output_config.format"), (self.output_format, "output_format")]
        found = [(form, where) for form, where in forms if form is not None]
        if len(found) > 1:
            raise _refused("output_format", "output_config.format is there too; remove one of them")
        if not found:
            return None, config.get("effort")
        form, where = found[0]
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise _refused(f"{where}.type", "must be json_schema; correct it")
        return of_response_format(form, where), config.get("effort")

    def variables(self) -> JsonObject:
        """Of the template. Raises Refusal (400)."""
        effort = self.output()[1]
        if effort is not None and not isinstance(effort, str):
            raise _refused("output_config.effort", "must be a text")
        return template_kwargs(self.chat_template_kwargs, effort)


class MessagesRequest(_Conversation):
    """`POST /v1/messages`, Anthropic's."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "default", "max_tokens": 256, "messages": [{"role": "user", "content": "What is 15 × 23?"}]}
            ]
        }
    )

    max_tokens: int = Field(ge=1, le=MAX_TOKENS_LIMIT, description="Tokens of the answer.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Null: the run's. 0 is greedy.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Null: the run's.")
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="Null: the run's.")
    stop_sequences: Annotated[list[str], STOP] | None = Field(default=None, description="Texts that end the answer.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    rollout_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Calls with the same id are the turns of one rollout; or name it in the URL, or in X-Rollout-Id.",
    )

    def _options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """These options over the run's. Raises Refusal (400)."""
        try:
            sampling, form = self._options().sampling(default), self.output()[0]
        except Refusal as refusal:
            if refusal.path != "stop":
                raise
            raise _refused("stop_sequences", str(refusal)) from refusal
        return sampling if form is None else msgspec.structs.replace(sampling, grammar=form)

    def call(self) -> ChatCall:
        """What is asked. Raises Refusal (400)."""
        self.check_fields()
        self._options().check_rollout(self.rollout_id)
        tools = self.functions()
        return ChatCall(
            model=self.model,
            messages=self.conversation(),
            tools=tools,
            stream=self.stream,
            rollout_id=self.rollout_id,
            tool_choice=self.choice(tools),
            template_kwargs=self.variables(),
        )


class CountRequest(_Conversation):
    """`POST /v1/messages/count_tokens`, Anthropic's."""

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        self.choice(self.functions())
        self.output()


_STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer:
    """The answer to one request, whole or as events."""

    def __init__(self, request: MessagesRequest, sampling: SamplingParams, text: TextStream) -> None:
        """`text` is the one of the stream."""
        self._request, self._sampling, self._text = request, sampling, text
        self._id = f"msg_{secrets.token_hex(12)}"

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Anthropic's message, with our own fields of a chat completion."""
        return self._message(blocks_of(answer.messages[0]), self._end(answer), _usage(answer)) | own_fields(answer)

    async def events(self, source: AsyncIterator[TokenDelta | Answer]) -> AsyncIterator[bytes]:
        """Bytes to send; exceptions of `source` pass through. The last but one has our own fields."""
        begun = self._message([], {"stop_reason": None, "stop_sequence": None}, {"input_tokens": 0, "output_tokens": 0})
        yield event("message_start", message=begun)
        shows_text = False
        async for one in texts(source, [self._text]):
            if isinstance(one, Answer):
                for made in self._last(one, shows_text=shows_text):
                    yield made
                return
            if not shows_text:
                shows_text = True
                yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": one[1]})

    def _last(self, answer: Answer, *, shows_text: bool) -> Iterator[bytes]:
        for index, block in enumerate(blocks_of(answer.messages[0])):
            if block["type"] == "tool_use":
                yield event("content_block_start", index=index, content_block={**block, "input": {}})
                arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield event("content_block_delta", index=index, delta=arguments)
            elif not shows_text:
                yield event("content_block_start", index=index, content_block={"type": "text", "text": ""})
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta=self._end(answer), usage=_usage(answer), **own_fields(answer))
        yield event("message_stop")

    def _message(self, content: list[JsonObject], end: JsonObject, counts: JsonObject) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        return {**head, "content": content, **end, "usage": counts}

    def _end(self, answer: Answer) -> dict[str, Any]:
        [result] = answer.results
        reason, stopped = finish_reason(result, answer.messages[0]), stop_reason(result, self._sampling)
        if reason == "stop" and stopped in self._sampling.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        return {"stop_reason": _STOPPED[reason], "stop_sequence": None}


def blocks_of(message: Message) -> list[JsonObject]:
    """The content of an answer."""
    calls = message.get("tool_calls") or []
    blocks = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]
    text = message.get("content") or ""
    return [{"type": "text", "text": text}, *blocks] if text or not blocks else blocks


def _usage(answer: Answer) -> dict[str, int]:
    """Theirs are three disjoint counts of the prompt."""
    counts = usage(answer.results)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesProblemDetail(BaseModel):
    """What went wrong, where, and what to do."""

    type: str = Field(description="Such as `invalid_request_error` or `api_error`.")
    message: str = Field(description="For people; never contains an API key.")
    param: str | None = Field(description="The path of the field, such as `messages.0.role`.")


class MessagesProblem(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesProblemDetail


def problem(status: int, message: str, path: str | None = None) -> dict[str, Any]:
    """The body of an error in Anthropic's form, with the path of the field."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "param": path}}


def error_event(refusal: Refusal) -> bytes:
    """The last event of a stream that failed."""
    return event("error", error=problem(refusal.status, str(refusal), refusal.path)["error"])


class MessagesErrors:
    """ASGI middleware: every error at these paths has Anthropic's form, whoever made it."""

    def __init__(self, app: ASGIApp, paths: Sequence[str]) -> None:
        """`paths`: ends of them."""
        self._app, self._paths = app, tuple(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(self._paths):
            await self._app(scope, receive, send)
            return
        begun: AsgiMessage | None = None

        async def translated(message: AsgiMessage) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and message["status"] >= 400:
                begun = message
            elif begun is None:
                await send(message)
            else:  # an error's body is one message
                start, begun = begun, None
                body = _translated(start["status"], message["body"])
                kept = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                length = (b"content-length", str(len(body)).encode())
                await send({**start, "headers": [*kept, length]})
                await send({**message, "body": body})

        await self._app(scope, receive, translated)


def _translated(status: int, body: bytes) -> bytes:
    try:
        error = msgspec.json.decode(body)["error"]
        return msgspec.json.encode(problem(status, error["message"], error["param"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return body


def messages_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route of Anthropic's API, in that API's form."""
    return documented({status: ERRORS[status] for status in statuses}, MessagesProblem, problem)


MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_MessagesBody = Annotated[MessagesRequest, Body(openapi_examples=MESSAGES_EXAMPLES)]


class Counted(BaseModel):
    """The tokens of a conversation."""

    input_tokens: int = Field(description="As the chat template renders it.")


def message_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["agents"])
    said: dict[str, Any] = {"response_model": None, "responses": MESSAGES | messages_errors(*FAILURES)}

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

    @router.post("/v1/messages/count_tokens", summary="Tokens of a conversation", responses=messages_errors(*FAILURES))
    async def count(body: CountRequest) -> Counted:
        """Nothing is decoded."""
        return await _count(service, body)

    @router.post(
        f"{SCOPE}/v1/messages/count_tokens",
        summary="Tokens of a conversation, under a rollout's URL",
        responses=messages_errors(*FAILURES),
    )
    async def count_of_rollout(rollout_id: RolloutPath, body: CountRequest) -> Counted:
        """The same for every rollout, open or not."""
        return await _count(service, body)

    return router


async def _message(
    service: Service, body: MessagesRequest, request: Request, idempotency_key: str | None = None
) -> Response:
    service.chat.check_model(body.model, body.rollout_id)
    call = body.call()
    sampling = body.sampling(service.config.sampling)
    made = MessagesAnswer(body, sampling, service.text_stream(call, sampling))
    once = Once.of(idempotency_key, body, 1)
    return await service.respond(
        request,
        service.chat.events(call, sampling, once),
        stream=body.stream,
        whole=made.whole,
        events=made.events,
        error=error_event,
    )


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
    with service.gate.enter():
        prompt = partial(replace(service.renderer, options=options).prompt, messages)
        return Counted(input_tokens=len(await service.rendered(prompt)))
