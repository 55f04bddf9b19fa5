"""Four operations, for demonstrations and tests of the loop.

- Numbers are int, float or the text of one; whole results have no ".0".
- What has no finite answer, or more digits than anybody reads, is an error that says so.
- A delay simulates the time a real tool takes.
"""

from __future__ import annotations

import asyncio
import math
import operator
import random
from collections.abc import Callable
from typing import Any

from sluice.producers.agents.tools.function import Tool, ToolError

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
