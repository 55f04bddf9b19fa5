"""Chat messages and tools, as OpenAI's API writes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from producers.rollout.schemas.constants import (
    MAX_ID_LENGTH,
    MAX_NAME_LENGTH,
    STOP,
    JsonObject,
    OpenSchema,
    Role,
    Schema,
)


class FunctionCall(OpenSchema):
    """What to call; arguments are an object, or its JSON."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    arguments: str | JsonObject


class ToolCall(OpenSchema):
    """One call that the model asks for."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(OpenSchema):
    """One message; fields that are not listed are kept."""

    role: Role
    content: str | Annotated[list[JsonObject], STOP] | None = Field(
        default=None, description="Text, or a list of OpenAI's parts."
    )
    tool_calls: Annotated[list[ToolCall], STOP] | None = Field(
        default=None, description="What an assistant's message calls."
    )
    tool_call_id: str | None = Field(
        default=None, max_length=MAX_ID_LENGTH, description="Which call a tool's message answers."
    )

    def plain(self) -> JsonObject:
        """The message as it came: what was not sent stays away."""
        return self.model_dump(mode="json", exclude_unset=True)


class FunctionDefinition(OpenSchema):
    """A function's name, what it is for, and the JSON Schema of its arguments."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    description: str | None = None
    parameters: JsonObject = {}


class ToolDefinition(OpenSchema):
    """A tool as the model is told of it."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ToolsResponse(Schema):
    """`GET /tools`."""

    tools: Annotated[list[JsonObject], STOP]
