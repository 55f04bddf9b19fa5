"""The tools of a rollout server.

- Calls of one turn run in parallel, each under its own deadline; results come in the order of the calls. Calls beyond
  `max_calls` don't run, and the model reads so.
- A failing tool is data: whatever goes wrong becomes an "Error: …" message for the model, and the loop continues. An
  exception may hold a secret: the model sees only the text of a ToolError; the log has everything else.
- A result is bounded: text that can be encoded, or a list of such texts and images. The call fails if an image is too
  large or isn't one.
- It also fails for images beyond what the trainer accepts in one conversation: the trainer would refuse the whole next
  call.
- The built-in tools are four operations (`calculator`), for demonstrations and tests of the loop. What has no finite
  answer, or more digits than anybody reads, is an error that says so. A delay simulates the time a real tool takes.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sluice.pipeline.config.types import GatewayConfig, ImagesConfig, RolloutServerConfig
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, RequestError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.admission import MAX_PARTS, image_parts, image_url
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.codec import lone_surrogate, too_deep
from sluice.producers.agents.tools.function import FunctionTool, TimedTool, Tool, ToolError, ToolResult
from sluice.producers.agents.tools.image import ToolImage

MAX_DIGITS = 1_000

_Number = int | float
_OPERATIONS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("Add two numbers: a + b.", operator.add),
    "subtract": ("Subtract the second number from the first: a - b.", operator.sub),
    "multiply": ("Multiply two numbers: a * b.", operator.mul),
    "divide": ("Divide the first number by the second: a / b.", lambda a, b: _divide(a, b)),
}


class Operation:
    """One operation as a tool; `latency_ms` are the bounds of its delay."""

    def __init__(self, name: str, latency_ms: tuple[int, int]) -> None:
        self.name = name
        description, self._operate = _OPERATIONS[name]
        numbers = {
            "a": {"type": "number", "description": "The first number."},
            "b": {"type": "number", "description": "The second number."},
        }
        parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
        described = {"name": name, "description": description, "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": described}
        self._latency_ms = latency_ms

    async def call(self, arguments: dict[str, Any]) -> str:
        """The result's digits. Raises ToolError."""
        await asyncio.sleep(random.uniform(*self._latency_ms) / 1000)
        if unknown := sorted(set(arguments) - {"a", "b"}):
            raise ToolError(f"{self.name} has no argument {unknown[0]!r}; give a and b")
        a, b = (_number(self.name, arguments, which) for which in ("a", "b"))
        try:
            return _digits(self._operate(a, b))
        except OverflowError as error:
            raise ToolError(f"the result of {self.name} is too large; use smaller numbers") from error


def calculator(latency_ms: tuple[int, int]) -> list[Tool]:
    """add, subtract, multiply, divide."""
    return [Operation(name, latency_ms) for name in _OPERATIONS]


def _number(tool: str, arguments: dict[str, Any], which: str) -> _Number:
    value = arguments.get(which)
    if isinstance(value, str) and len(value) <= MAX_DIGITS:
        value = _read(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{tool} needs a number as {which}; give a and b, such as 2 or -1.5")
    if not _bearable(value):
        raise ToolError(f"{which} must be a finite number of at most {MAX_DIGITS} digits; use another one")
    return value


def _read(text: str) -> _Number | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _divide(a: _Number, b: _Number) -> _Number:
    if b == 0:
        raise ToolError("cannot divide by zero; use another divisor")
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b  # exact, however large
    return a / b


def _digits(value: _Number) -> str:
    if not _bearable(value):
        raise OverflowError
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def _bearable(value: _Number) -> bool:
    return abs(value) < 10**MAX_DIGITS if isinstance(value, int) else math.isfinite(value)


MAX_RESULT_CHARS = 262_144
MAX_CALLS = 32
_MAX_REASON_CHARS = 2_000
_BODY_MB = GatewayConfig().max_body_mb  # of a trainer that says nothing else
_IMAGE_SHARE = 7 / 8  # of a body; the rest is for texts and tools


class ToolBox:
    """Tools by name; `body_mb` is the largest request of the trainer. Raises ConfigError where two have one name."""

    def __init__(
        self,
        tools: Iterable[Tool],
        timeout_s: float,
        max_calls: int = MAX_CALLS,
        images: ImagesConfig | None = None,
        body_mb: float = _BODY_MB,
    ) -> None:
        self._timeout_s, self._max_calls, self._images = timeout_s, max_calls, images or ImagesConfig()
        self._body_mb = body_mb
        self._tools: dict[str, Tool] = {}
        for one in tools:
            if self._tools.setdefault(one.name, one) is not one:
                raise ConfigError(f"two tools are named {one.name!r}; rename one, or remove it from the configuration")

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, in the order of the configuration, each under the name that is called."""
        return [
            {**one.schema, "function": {**one.schema["function"], "name": name}} for name, one in self._tools.items()
        ]

    def plus(self, tools: Iterable[Tool], prefix: str) -> ToolBox:
        """These and those; a name that is taken gets the prefix, then a number."""
        made = ToolBox((), self._timeout_s, self._max_calls, self._images, self._body_mb)
        made._tools = dict(self._tools)
        for one in tools:
            names = (one.name, f"{prefix}_{one.name}", *(f"{prefix}_{one.name}_{at}" for at in range(2, 1000)))
            made._tools[next(name for name in names if name not in made._tools)] = one
        return made

    async def run(
        self, calls: Sequence[Mapping[str, Any]], conversation: Sequence[Mapping[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """One tool message per call {id, function: {name, arguments}}, in their order. Raises nothing of a tool's.

        The images of the `conversation` so far count toward the limit of the answers' images.
        """
        taken, refused = calls[: self._max_calls], calls[self._max_calls :]
        tasks = [asyncio.create_task(self._message(call), name=f"tool {_name(call)[:80]}") for call in taken]
        answers = self._within_conversation(calls, await asyncio.gather(*tasks), conversation)
        text = f"Error: not run: {len(calls)} calls in one turn, the limit is {self._max_calls}; ask for it again"
        return answers + [_answer(call, text) for call in refused]

    async def _message(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function, name = call.get("function") or {}, _name(call)
        try:
            result = await self._within_deadline(name, function.get("arguments"))
            return _answer(call, result if isinstance(result, str) else await self._parts(name, result))
        except ToolError as error:
            text = f"Error: {error}"
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            text = f"Error: {name} cancelled itself; try another way"
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            get_logger().warning("a tool failed", tool=name, why=reason)
            text = f"Error: {name} failed; correct the arguments, or try another way"
        return _answer(call, text)

    def _within_conversation(
        self,
        calls: Sequence[Mapping[str, Any]],
        answers: Sequence[dict[str, Any]],
        conversation: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """The answers, in order; one with more images than fit becomes an error."""
        most, most_chars = self._images.max_per_prompt, int(self._body_mb * 2**20 * _IMAGE_SHARE)
        count, chars = _images_of(conversation)
        kept: list[dict[str, Any]] = []
        for call, answer in zip(calls, answers, strict=False):
            own, own_chars = _images_of([answer])
            why = None
            if own and count + own > most:
                why = f"would have {count + own}, the limit is {most}; continue without more"
            elif own and chars + own_chars > most_chars:
                total = (chars + own_chars) >> 10
                why = f"would have {total} KiB of them in base64, the limit is {most_chars >> 10}; ask for smaller ones"
            if why is None:
                count, chars = count + own, chars + own_chars
            else:
                answer = _answer(
                    call, f"Error: {_name(call)} returned images that aren't shown: the conversation {why}"
                )
            kept.append(answer)
        return kept

    async def _parts(self, name: str, result: Sequence[str | ToolImage]) -> list[dict[str, Any]]:
        """The parts of a message. Raises ToolError for an image that can't be shown."""
        if (count := sum(isinstance(one, ToolImage) for one in result)) > self._images.max_per_prompt:
            raise ToolError(f"{name} returned {count} images, at most {self._images.max_per_prompt} are shown")
        if len(result) > MAX_PARTS:
            raise ToolError(f"{name} returned {len(result)} texts and images, at most {MAX_PARTS} are shown")
        parts: list[dict[str, Any]] = []
        chars = MAX_RESULT_CHARS  # of all texts together
        for one in result:
            if isinstance(one, str):
                parts.append({"type": "text", "text": _bounded(one, chars)})
                chars = max(0, chars - len(one))
                continue
            try:
                parts.append(await asyncio.to_thread(one.part, self._images, f"an image of {name}"))
            except RequestError as error:
                get_logger().warning("a tool's image can't be shown", tool=name, why=str(error))
                raise ToolError(f"{name} returned an image that can't be shown; try another way") from error
        return parts

    async def _within_deadline(self, name: str, arguments: Any) -> ToolResult:
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"there is no tool {name[:256]!r}; the tools are: {known}")
        given, tool = _object(arguments), self._tools[name]
        try:
            if isinstance(tool, TimedTool):
                return await tool.call_within(given, self._timeout_s)
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await tool.call(given)
        except (TimeoutError, DeadlineExceeded) as error:
            if isinstance(error, TimeoutError) and (isinstance(tool, TimedTool) or not deadline.expired()):
                raise
            message = f"{name} did not answer within {self._timeout_s:g} s; ask for less, or try another way"
            raise ToolError(message) from error


def load_tools(config: RolloutServerConfig, images: ImagesConfig | None = None, body_mb: float = _BODY_MB) -> ToolBox:
    """The tools that `rollout_server.tools` names; `images` and `body_mb` bound what they show. Raises ConfigError."""
    found: list[Tool] = []
    for name in config.tools:
        found += calculator(config.tool_latency_ms) if name == "calculator" else _imported(name)
    for one in found:
        if isinstance(one, FunctionTool):
            one.limit_threads(config.tool_threads)
    return ToolBox(found, config.tool_timeout_s, config.max_tool_calls, images, body_mb)


def _imported(name: str) -> list[Tool]:
    where = f"rollout_server.tools: {name!r}"
    if ":" not in name:
        raise ConfigError(f"{where} is not a tool; write calculator, or package.module:name for your own tool")
    found = load_object(name, "rollout_server.tools")
    tools = list(found) if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, Tool) for one in tools):
        raise ConfigError(f"{where} is not a tool; decorate the function with sluice.producers.agents.tools.tool")
    return tools


def _name(call: Mapping[str, Any]) -> str:
    return str((call.get("function") or {}).get("name", ""))


def _images_of(messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many images the messages have, and the length of their URLs, which hold the bytes."""
    parts = image_parts(messages)
    return len(parts), sum(len(url) for part in parts if isinstance(url := image_url(part), str))


def _answer(call: Mapping[str, Any], content: str | list[dict[str, Any]]) -> dict[str, Any]:
    if isinstance(content, str):
        content = _bounded(content)
    return {"role": "tool", "tool_call_id": call.get("id", ""), "name": _name(call), "content": content}


def _object(arguments: Any) -> dict[str, Any]:
    """The arguments, given as JSON text or as an object; none at all is an empty object."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON ({error}); write one JSON object") from error
    if arguments in (None, "") or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments are a {type(arguments).__name__}; write one JSON object")
    if problem := too_deep(arguments, "the arguments") or lone_surrogate(arguments, "the arguments"):
        raise ToolError(problem)
    return dict(arguments)


def _bounded(text: str, most: int = MAX_RESULT_CHARS) -> str:
    if len(text) > most:
        text = f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"
    return text.encode("utf-8", "replace").decode()
