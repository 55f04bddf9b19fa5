"""A tool, and how a Python function becomes one.

- The schema comes from the function's annotations, and arguments are checked against it before the call.
- A coroutine runs in the event loop, a plain function in a thread. A deadline ends the wait for a thread, not the
  thread: write anything that may wait as a coroutine.
- A parameter annotated with `Rollout` gets the rollout's id and state; it is no part of the schema.
- Each plain function has separate threads (`rollout_server.tool_threads`), so one that hangs takes none of another's.
  Its time limit counts from its start in a thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol, get_type_hints, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.thread_pool import ThreadPool
from sluice.producers.agents.environment import Rollout, current
from sluice.producers.agents.tools.image import ToolImage

ToolResult = str | list[str | ToolImage]
"""What the model reads: a text, or texts and images in order."""

_MOST_LOST = 32  # calls of one function that never ended


class ToolError(SluiceError):
    """Reaches the model as "Error: …"; raised by a tool to choose the wording."""


@runtime_checkable
class Tool(Protocol):
    """What the model can call."""

    name: str
    schema: dict[str, Any]
    """The function as in OpenAI's API: {"type": "function", "function": {name, description, parameters}}."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """The result as the model reads it. May raise anything."""
        ...


@runtime_checkable
class TimedTool(Tool, Protocol):
    """A tool that may have to wait for a free thread."""

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """As `call`; the time begins with the work. Raises DeadlineExceeded."""
        ...


class FunctionTool:
    """A Python function as a tool."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        self.limit_threads(RolloutServerConfig().tool_threads)
        self._rollout, self._arguments, parameters = _arguments_model(function)
        parameters.pop("title", None)
        for parameter in parameters.get("properties", {}).values():
            parameter.pop("title", None)
        described = {"name": self.name, "description": inspect.getdoc(function) or "", "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": described}

    def limit_threads(self, threads: int) -> None:
        """Limit a plain function to this many calls at a time."""
        self._pool = ThreadPool(f"tool {self.name}", threads, max_lost=_MOST_LOST)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Strings and images unchanged, also in a list; everything else as JSON.

        Raises ToolError for arguments that don't fit.
        """
        return await self.call_within(arguments, inf)

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """The same. Raises DeadlineExceeded."""
        values = self._checked(arguments)
        return _result(await self._pool.call(partial(self._function, **values), timeout_s=timeout_s, what=self.name))

    def _checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(arguments)
        except ValidationError as error:
            complaints = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolError(f"{self.name} rejects these arguments ({complaints}); correct them") from error
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        return values | dict.fromkeys(self._rollout, current.get() or Rollout(""))


def tool(function: Callable[..., Any]) -> FunctionTool:
    """A function with annotations and a docstring as a tool. Raises ConfigError where it has no schema."""
    return FunctionTool(function)


def _result(value: Any) -> ToolResult:
    parts: list[Any] = (
        [value] if isinstance(value, ToolImage) else list(value) if isinstance(value, list | tuple) else []
    )
    if any(isinstance(part, ToolImage) for part in parts):
        return [part if isinstance(part, ToolImage) else _text(part) for part in parts]
    return _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _arguments_model(function: Callable[..., Any]) -> tuple[list[str], type[BaseModel], dict[str, Any]]:
    """(Parameters that get the rollout, what checks the others, and its JSON Schema.)"""
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        of_rollout = [name for name, hint in hints.items() if hint is Rollout and name != "return"]
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"{name} must be an ordinary parameter")
            if name in of_rollout:
                continue
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        return of_rollout, model, model.model_json_schema()
    except KeyError as error:
        raise ConfigError(f"tool {function.__name__}: parameter {error} has no annotation; give it one") from error
    except (PydanticUserError, TypeError, NameError, ValueError, SyntaxError) as error:
        raise ConfigError(f"tool {function.__name__} has no schema ({error}); correct its signature") from error
