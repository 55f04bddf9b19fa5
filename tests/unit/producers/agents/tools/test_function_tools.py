"""How a Python function becomes a tool."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from sluice.pipeline.errors import ConfigError
from sluice.producers.agents.tools import Tool, ToolBox, tool


def test_the_schema_is_that_of_the_annotations() -> None:
    def look(city: Annotated[str, Field(description="Where.")], days: int = 1) -> str:
        """The weather.

        In words.
        """
        return f"{city} {days}"

    made = tool(look)
    assert isinstance(made, Tool)
    assert json.loads(json.dumps(ToolBox([made], 1).schemas())) == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "The weather.\n\nIn words.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Where."},
                        "days": {"type": "integer", "default": 1},
                    },
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]


def no_annotation(text) -> str: ...  # type: ignore[no-untyped-def]
def any_number(*texts: str) -> str: ...
def any_name(**texts: str) -> str: ...
def unknown_type(text: Nowhere) -> str: ...  # type: ignore[name-defined]  # noqa: F821
def no_schema(text: threading.Lock) -> str: ...  # type: ignore[valid-type]


@pytest.mark.parametrize("function", [no_annotation, any_number, any_name, unknown_type, no_schema])
def test_a_function_without_a_schema_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=f"tool {function.__name__}"):
        tool(function)
