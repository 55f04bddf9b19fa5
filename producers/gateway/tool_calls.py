"""Tool calls in a model's text, as OpenAI's clients expect them.

- Anything but a well-formed call stays content; nothing the model wrote is lost. A name or arguments with half a
  character (`\\ud800`) aren't a call either: JSON couldn't carry them to a client.
- Ids are derived from the turn's key, so a repeated request gets the same ones.
- A custom parser is a function `text -> Parsed`; its optional attribute `marker` is the start of a call. A streaming
  caller gets text up to the marker as it arrives; without a marker, all text comes at the end. With its optional method
  `structure`, an answer can be forced to be calls (structured_output.py).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from sluice.pipeline.errors import ConfigError
from sluice.pipeline.wire.codec import lone_surrogate, too_deep

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
    """`hermes`, or `package.module:function`; vLLM's are in vllm_parsers.py. Raises ConfigError."""
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
    if lone_surrogate([[call.name, call.arguments] for call in found.calls], "it"):
        return Parsed(text)
    return found


def assistant_message(parsed: Parsed, key: str, reasoning: str = "") -> dict[str, Any]:
    """The message a client receives and sends back; with its reasoning or without makes no difference then."""
    thought = {"reasoning": reasoning} if reasoning else {}
    if not parsed.calls:
        return {"role": "assistant", **thought, "content": parsed.content}
    calls = [
        {
            "id": f"call_{key[:16]}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(parsed.calls)
    ]
    return {"role": "assistant", **thought, "content": parsed.content or None, "tool_calls": calls}


def _hermes_call(text: str) -> Call | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    if too_deep(arguments, "arguments") or lone_surrogate([name, arguments], "it"):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))
