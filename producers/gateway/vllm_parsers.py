"""vLLM's parsers of tool calls and of reasoning, by name: `vllm:NAME`, where vLLM is installed.

They read whole answers; a stream shows their text at its end. What the model sampled isn't touched: only the message
is made of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.logs import get_logger
from sluice.producers.gateway.tool_calls import Call, Parsed, ToolParser, load_tool_parser

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
        _tried(key, name, lambda: self._read("a", "a", {}))

    def split(self, text: str, raw_text: str, kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """(reasoning, the rest) of an answer to a prompt rendered with these variables; both stripped.

        An answer that the parser fails on has no reasoning.
        """
        try:
            reasoning, content = self._read(text, raw_text, kwargs)
        except Exception as error:  # a parser may raise anything on what a model writes
            get_logger().warning("the reasoning parser failed", parser=self._name, error=repr(error))
            return "", text
        return (reasoning or "").strip(), (content or "").strip()

    def _read(self, text: str, raw_text: str, kwargs: Mapping[str, Any]) -> tuple[str | None, str | None]:
        kwargs = {"enable_thinking": False, **kwargs}  # as prompts are rendered
        asked = self._request(messages=[{"role": "user", "content": ""}], model="default", chat_template_kwargs=kwargs)
        parser = self._make(self._tokenizer, chat_template_kwargs=kwargs)
        adjusted = parser.adjust_request(asked)
        reasoning, content = parser.extract_reasoning(text if adjusted.skip_special_tokens else raw_text, adjusted)
        return reasoning, content


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
