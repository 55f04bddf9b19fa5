"""What models write besides text: tool calls and reasoning, read from it; and calls forced by a grammar.

- Anything but a well-formed call stays content; nothing the model wrote is lost. A call can be sent to a client, in
  every API, and come back: its arguments are an object of RFC 8259 (no `NaN`, `1e999` or half a character as `\\ud800`)
  without integers beyond 64 bits.
- Ids are derived from the turn's key, so a repeated request gets the same ones.
- A custom parser is a function `text -> Parsed`; its optional attribute `marker` is the start of a call. A streaming
  caller gets text up to the marker as it arrives; without a marker, all text comes at the end. With its optional method
  `structure(functions, one)`, which gives a format of xgrammar's structural tags or None, an answer can be forced to be
  calls: `tool_choice` becomes a grammar of the sampling.
- vLLM's parsers of calls and of reasoning, by name, `vllm:NAME`, where vLLM is installed. They read whole answers; a
  stream shows their text at its end. What the model sampled isn't touched: only the message is made of it.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, cast

import msgspec

from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.errors import ConfigError, RequestError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import lone_surrogate, too_deep
from sluice.pipeline.wire.messages import Grammar, GrammarKind, Message, SamplingParams, SequenceResult
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.http import strict_json
from sluice.producers.http.schemas import MAX_NAME_LENGTH, JsonObject

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """The text without its calls, plus the calls in order."""

    content: str
    calls: Sequence[Call] = ()


class ToolParser(Protocol):
    """How a model writes its calls."""

    def __call__(self, text: str, /) -> Parsed: ...


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes write it; the last may be open."""

    marker = "<tool_call>"

    def structure(self, functions: Sequence[dict[str, Any]], one: bool) -> dict[str, Any]:
        """One or more calls of these functions, as a format of xgrammar's structural tags."""
        tags = [
            {
                "type": "tag",
                "begin": '<tool_call>\n{"name": '
                + json.dumps(function.get("name"), ensure_ascii=False)
                + ', "arguments": ',
                "content": {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}},
                "end": "}\n</tool_call>",
            }
            for function in functions
        ]
        repeated = {"separator": "\n", "at_least_one": True, "stop_after_first": one}
        return {"type": "tags_with_separator", "tags": tags, **repeated}

    def __call__(self, text: str, /) -> Parsed:
        """Content is the text outside well-formed calls, stripped."""
        calls: list[Call] = []
        kept: list[str] = []
        end = 0
        for found in _HERMES.finditer(text):
            if (call := _hermes_call(found.group(1))) is not None:
                calls.append(call)
                kept.append(text[end : found.start()])
                end = found.end()
        kept.append(text[end:])
        return Parsed("\n".join(part for piece in kept if (part := piece.strip())), calls)


def load_tool_parser(name: str) -> ToolParser:
    """`hermes`, or `package.module:function`; vLLM's: load_parser. Raises ConfigError."""
    if name == "hermes":
        return Hermes()
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"gateway.tool_parser: {name!r} is none of hermes, vllm:NAME and package.module:function")
    try:
        parser = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"gateway.tool_parser: {name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not callable(parser):
        raise ConfigError(f"gateway.tool_parser: {name!r} is not a function")
    return cast(ToolParser, parser)


def read_calls(parser: ToolParser, text: str, raw_text: str = "", tools: Sequence[Any] = ()) -> Parsed:
    """What the parser finds; all of it stays text if one of its calls can't be sent.

    A parser with a method `read` also gets the text with special tokens, and the request's tools.
    """
    read = getattr(parser, "read", None)
    found = parser(text) if read is None else read(text, raw_text, tools)
    can_be_sent = all(_is_name(call.name) and _object(call.arguments) is not None for call in found.calls)
    return found if can_be_sent else Parsed(text)


def _is_name(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and not lone_surrogate(name, "it")


def _object(text: str) -> JsonObject | None:
    """The JSON object that a request may have as a call's arguments; None if it is anything else."""
    try:
        found = strict_json.decode(text.encode())
    except (ValueError, RequestError):
        return None
    if not isinstance(found, dict) or too_deep([[[[[found]]]]], "it"):  # a body of /v1/messages has 5 levels around it
        return None
    return found


def assistant_message(parsed: Parsed, key: str, reasoning: str = "") -> dict[str, Any]:
    """The message a client receives and sends back; with its reasoning or without makes no difference then."""
    thought = {"reasoning": reasoning} if reasoning else {}
    if not parsed.calls:
        return {"role": "assistant", **thought, "content": parsed.content}
    calls = [
        {
            "id": f"call_{key[-16:]}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(parsed.calls)
    ]
    return {"role": "assistant", **thought, "content": parsed.content or None, "tool_calls": calls}


def _hermes_call(text: str) -> Call | None:
    if (found := _object(text)) is None:
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not _is_name(name) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def grammar(kind: GrammarKind, value: Any, where: str) -> Grammar:
    """`value` is text, or plain values that are written as JSON. Raises Refusal (400)."""
    try:
        return Grammar(kind=kind, text=value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"{where}: {error}", where) from error


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the answer may or must call."""

    parses: bool = True  # calls are told apart from the text
    must: bool = False  # the answer is calls
    name: str | None = None  # of this tool; None: of any
    one: bool = False  # a single call: calls that the model writes after it are left out of the answer

    @classmethod
    def of(
        cls, choice: Any, tools: Sequence[JsonObject], *, one: bool = False, where: str = "tool_choice"
    ) -> ToolChoice:
        """OpenAI's: `auto`, `none`, `required` or a function. `one`: parallel calls are off. Raises Refusal (400)."""
        if choice in (None, "auto", "none"):
            parses = bool(tools) and choice != "none"
            return cls(parses=parses, one=one and parses)
        name = _named(choice)
        if choice != "required" and name is None:
            shown = 'it may be "auto", "none", "required", or {"type": "function", "function": {"name": …}}'
            raise Refusal(400, f"{where}: {choice!r:.80} is not a choice; {shown}", where)
        names = [_function(tool).get("name") for tool in tools]
        if not names or (name is not None and name not in names):
            missing = "there are no tools" if not names else f"no tool is named {name!r:.80}"
            raise Refusal(400, f"{where}: {missing}; send it in tools", where)
        return cls(must=True, name=name, one=one or name is not None)

    def unusual(self, tools: Sequence[JsonObject]) -> list[bool]:
        """What of it neither the sampling nor the tools say: empty if calls are parsed where there are tools, all of
        them."""
        return [self.parses, self.one] if self.one or self.parses != bool(tools) else []


NO_TOOLS = ToolChoice(parses=False)


def with_calls(
    sampling: SamplingParams, usual: SamplingParams, choice: ToolChoice, tools: Sequence[JsonObject], parser: Any
) -> SamplingParams:
    """The sampling with the answer forced to be calls, if it must be. `usual`: the run's. Raises Refusal (400)."""
    if not choice.must:
        return sampling
    if sampling.grammar != usual.grammar:
        message = "tool_choice: the answer can't be both a call and what another field asks for; remove one of them"
        raise Refusal(400, message, "tool_choice")
    functions = [_function(tool) for tool in tools if choice.name in (None, _function(tool).get("name"))]
    structure = getattr(parser, "structure", None)
    written = None if structure is None else structure(functions, choice.one)
    if written is None:
        message = "tool_choice: gateway.tool_parser doesn't say how its calls are written; send auto or none"
        raise Refusal(400, message, "tool_choice")
    tag = {"type": "structural_tag", "format": written}
    return msgspec.structs.replace(sampling, grammar=grammar("structural_tag", tag, "tools"))


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)  # chat completions, or responses
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _function(tool: JsonObject) -> JsonObject:
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


PREFIX = "vllm:"
_REQUEST = "vllm.entrypoints.openai.chat_completion.protocol"


class VllmToolParser:
    """One of `vllm.tool_parsers`."""

    marker = ""  # nothing is shown before the end: where a call begins is the parser's matter

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises ConfigError if vLLM isn't installed, or has no such parser for this tokenizer."""
        key = "gateway.tool_parser"
        self._make = _found(key, name, "vllm.tool_parsers", "ToolParserManager", "get_tool_parser")
        self._tokenizer, self._name = tokenizer, name
        self._request: Any = importlib.import_module(_REQUEST).ChatCompletionRequest
        _tried(key, name, lambda: self._make(tokenizer, None))

    def __call__(self, text: str, /) -> Parsed:
        """As `read`, without tools."""
        return self.read(text, text, ())

    def read(self, text: str, raw_text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        """The calls in an answer to a request with these tools; `raw_text` has special tokens.

        An answer that the parser fails on stays text.
        """
        try:
            asked = self._asked(tools, "auto")
            parser = self._make(self._tokenizer, asked.tools)
            adjusted = parser.adjust_request(asked)
            read = text if adjusted.skip_special_tokens else raw_text
            found = parser.extract_tool_calls(read, adjusted)
        except Exception as error:  # a parser may raise anything on what a model writes
            get_logger().warning("the tool parser failed", parser=self._name, error=repr(error))
            return Parsed(text)
        if not found.tools_called:
            return Parsed(text)
        calls = [Call(one.function.name, one.function.arguments) for one in found.tool_calls]
        return Parsed((found.content or "").strip(), calls)

    def structure(self, functions: Sequence[Mapping[str, Any]], one: bool) -> dict[str, Any] | None:
        """As xgrammar's builtin formats have it; None if the parser names none, or one that can't end after a call."""
        tools = [{"type": "function", "function": {**function, "strict": True}} for function in functions]
        named = {"type": "function", "function": {"name": functions[0]["name"]}}
        asked = self._asked(tools, named if one and len(functions) == 1 else "required")
        tag = self._make(self._tokenizer, asked.tools).get_structural_tag(asked)
        form = None if tag is None else tag.model_dump(mode="json")["format"]
        if one and form is not None and form["type"] == "tags_with_separator":
            return {**form, "stop_after_first": True}
        return form if not one or len(functions) == 1 else None

    def _asked(self, tools: Sequence[Mapping[str, Any]], choice: Any) -> Any:
        fields: dict[str, Any] = {"tools": [dict(tool) for tool in tools], "tool_choice": choice} if tools else {}
        return self._request(messages=[{"role": "user", "content": ""}], model="default", **fields)


class VllmReasoningParser:
    """One of `vllm.reasoning`."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises ConfigError as the other."""
        key = "gateway.reasoning_parser"
        self._make = _found(key, name, "vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser")
        self._tokenizer, self._name = tokenizer, name
        self._request: Any = importlib.import_module(_REQUEST).ChatCompletionRequest
        specials = [re.escape(one.content) for one in tokenizer.added_tokens_decoder.values() if one.special]
        self._specials = re.compile(f"({'|'.join(sorted(specials, key=len, reverse=True)) or '(?!)'})")
        _tried(key, name, lambda: self._read("a", "a", {}))

    def split(self, text: str, raw_text: str, kwargs: Mapping[str, Any]) -> tuple[str, str, str]:
        """(reasoning, the rest, the rest with special tokens) of an answer to a prompt rendered with these variables.

        All stripped. An answer that the parser fails on has no reasoning.
        """
        try:
            reasoning, content = self._read(text, raw_text, kwargs)
        except Exception as error:  # a parser may raise anything on what a model writes
            get_logger().warning("the reasoning parser failed", parser=self._name, error=repr(error))
            return "", text, raw_text
        content = (content or "").strip()
        return (reasoning or "").strip(), content, self._with_specials(raw_text, content)

    def _with_specials(self, raw_text: str, content: str) -> str:
        """The end of the raw text that shows this; the parser may have left its special tokens out."""
        pieces = self._specials.split(raw_text)  # text at even places, a special token at odd ones
        shown = "".join(pieces[::2]).rstrip()
        if not shown.endswith(content):  # the parser has made something else of it
            return content
        left, at = len(shown) - len(content), 0
        for place, piece in enumerate(pieces):
            if place % 2 == 0:
                if len(piece) >= left:
                    break
                left -= len(piece)
            at += len(piece)
        return raw_text[at + left :]

    def _read(self, text: str, raw_text: str, kwargs: Mapping[str, Any]) -> tuple[str | None, str | None]:
        kwargs = {"enable_thinking": False, **kwargs}  # as prompts are rendered
        asked = self._request(messages=[{"role": "user", "content": ""}], model="default", chat_template_kwargs=kwargs)
        parser = self._make(self._tokenizer, chat_template_kwargs=kwargs)
        adjusted = parser.adjust_request(asked)
        reasoning, content = parser.extract_reasoning(text if adjusted.skip_special_tokens else raw_text, adjusted)
        return reasoning, content


class AnswerReader:
    """Makes a message of what a model wrote."""

    def __init__(self, parser: ToolParser, reasoning: VllmReasoningParser | None, ends: Sequence[str]) -> None:
        """`ends`: texts of the tokens that end a turn."""
        self._parser, self._reasoning, self._ends = parser, reasoning, tuple(filter(None, ends))

    def message(
        self,
        result: SequenceResult,
        key: str,
        *,
        tools: Sequence[Any] = (),
        choice: ToolChoice = NO_TOOLS,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Message:
        """The message of an answer to a request with these; `key` makes the ids of its calls."""
        text, raw_text, thought = result.text, self._before_its_end(result), ""
        formed = result.sampling.grammar
        if self._reasoning is not None and (formed is None or formed.kind in ("regex", "grammar")):
            thought, text, raw_text = self._reasoning.split(text, raw_text, template_kwargs or {})
        parsed = read_calls(self._parser, text, raw_text, tools) if choice.parses else Parsed(text)
        if choice.one:
            parsed = replace(parsed, calls=parsed.calls[:1])
        return assistant_message(parsed, key, thought)

    def _before_its_end(self, result: SequenceResult) -> str:
        """The text with special tokens, without the token or the stop string that ended it."""
        text, stop = result.raw_text, result.stop_reason
        if stop in result.sampling.stop:
            return text.partition(str(stop))[0]
        return next((text.removesuffix(end) for end in self._ends if text.endswith(end)), text)


def load_parser(name: str, tokenizer: Any) -> ToolParser:
    """`vllm:NAME` with this tokenizer, or one of `load_tool_parser`. Raises ConfigError."""
    if name.startswith(PREFIX):
        return VllmToolParser(name.removeprefix(PREFIX), tokenizer)
    return load_tool_parser(name)


def load_reasoning_parser(name: str, tokenizer: Any) -> VllmReasoningParser | None:
    """None for "". Raises ConfigError."""
    if not name:
        return None
    if not name.startswith(PREFIX):
        raise ConfigError(f"gateway.reasoning_parser: {name!r} is not {PREFIX}NAME")
    return VllmReasoningParser(name.removeprefix(PREFIX), tokenizer)


def _found(key: str, name: str, module: str, manager: str, getter: str) -> Any:
    try:
        registry: Any = getattr(importlib.import_module(module), manager)
    except ImportError as error:
        raise ConfigError(f"{key}: {PREFIX}{name} needs vLLM, which isn't installed here ({error})") from error
    known = registry.list_registered()
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {PREFIX}{near}?" if near else f"it has {', '.join(known)}"
        raise ConfigError(f"{key}: vLLM has no parser {name!r}; {meant}")
    return getattr(registry, getter)(name)


def _tried(key: str, name: str, make: Any) -> None:
    try:
        make()
    except Exception as error:  # it looks for its own tokens in the vocabulary, and raises anything
        raise ConfigError(f"{key}: {PREFIX}{name} can't be used with this tokenizer: {error}") from error
