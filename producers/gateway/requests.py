"""A chat request as sent, and the part that workers support.

- Omitted or null fields use the run's settings.
- Every other field is refused by name (fields.py).
- Images: images.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, field_validator

from sluice.pipeline.wire.messages import MAX_GROUP, Message, SamplingParams
from sluice.producers.gateway import fields
from sluice.producers.gateway.fields import ListedSchema
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.http.schemas import (
    MAX_ID_LENGTH,
    MAX_TOKENS_LIMIT,
    STOP,
    CompletionsRequest,
    TokenId,
)


class StreamOptions(ListedSchema):
    """What a stream contains besides text."""

    unserved = fields.STREAM

    include_usage: bool = Field(default=False, description="Send one more event before the end, with the token counts.")


class ChatRequest(ListedSchema, CompletionsRequest):
    """`POST /v1/chat/completions`. Omitted or null fields use the run's settings."""

    unserved = fields.CHAT

    rollout_id: str | None = Field(  # type: ignore[assignment]
        default=None,
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Calls with the same id are the turns of one rollout, whose tokens become one training sequence.",
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy.")  # type: ignore[assignment]
    top_p: float | None = Field(default=None, ge=0, le=1, description="1 is off.")  # type: ignore[assignment]
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="-1 and 0 are off.")
    repetition_penalty: float | None = Field(default=None, description="1 is off.")
    max_tokens: int | None = Field(  # type: ignore[assignment]
        default=None, ge=1, le=MAX_TOKENS_LIMIT, description="Tokens per answer."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS_LIMIT, description="OpenAI's newer name for `max_tokens`; takes precedence."
    )
    stop: str | Annotated[list[str], STOP] | None = Field(  # type: ignore[assignment]
        default=None, description="Texts that end the answer."
    )
    stop_token_ids: Annotated[list[TokenId], STOP] | None = Field(
        default=None, description="Tokens that end the answer."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="The same seed gives the same tokens.")
    n: int | None = Field(default=None, ge=1, le=MAX_GROUP, description="Number of answers; 1 with a `rollout_id`.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    logprobs: bool | None = Field(  # type: ignore[assignment]
        default=None, description="Also add OpenAI's form to each choice; the top-level `logprobs` is always there."
    )
    return_token_ids: bool | None = Field(
        default=None, description="vLLM's; the ids of the prompt and the answer are always there."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of `logprobs` `token_id:N` instead of by their text."
    )
    tool_choice: Any = Field(default=None, description='`"auto"`, or `"none"`: calls in the answer stay text.')

    def plain_messages(self) -> list[Message]:
        """The messages as they came. Raises Refusal (400) for values the queue can't carry."""
        try:
            messages = [message.plain() for message in self.messages]
            check_can_travel(messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from error
        return messages

    @property
    def count(self) -> int:
        """The number of answers requested."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def parses_tools(self) -> bool:
        """Whether the answer is parsed for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        """Raises Refusal (400) for unsupported options."""
        self.check_fields()
        if self.stream_options is not None:
            self.stream_options.check_fields("stream_options.")
        fields.check_value(fields.TOOL_CHOICE, self.tool_choice, "tool_choice")
        if self.rollout_id is not None and self.count != 1:
            raise Refusal(400, f"n is {self.n}; a rollout's turn has one answer, so remove it", "n")
        if self.rollout_id is not None and not 1 <= len(self.rollout_id.strip()) <= MAX_ID_LENGTH:
            raise Refusal(400, f"rollout_id must have 1..{MAX_ID_LENGTH} characters, not all blank", "rollout_id")

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """These options over the run's. Raises Refusal (400) for a value out of range."""
        given = {
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_k": 1 if self.top_p == 0 else self.top_k,
            "top_p": self.top_p or None,  # 0 means only the likeliest token
            "repetition_penalty": self.repetition_penalty,
            "stop": _strings(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "seed": self.seed,
        }
        try:
            found = {key: value for key, value in given.items() if value is not None}
            # The kept tokens wouldn't match a truncated prompt.
            return msgspec.structs.replace(default, **found, truncate_prompt=False)
        except ValueError as error:
            raise Refusal(400, f"{error}; correct or remove it", str(error).partition(" ")[0]) from error


class FinishRequest(ListedSchema):
    """`POST /v1/rollout/{rollout_id}/finish`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"final_status": "COMPLETED", "reward": 1.0}]})

    final_status: Literal["COMPLETED", "ERROR", "CANCELLED"] = Field(description="Only COMPLETED rollouts are trained.")
    reward: float | None = Field(default=None, description="Of the whole rollout; null: the task decides.")
    truth: Any = Field(default=None, description="For the task; null: the truth the rollout was opened with.")

    @field_validator("truth")
    @classmethod
    def _can_travel(cls, value: Any) -> Any:
        check_can_travel(value)
        return value


def check_can_travel(value: Any) -> None:
    """Raises ValueError for what the queue can't carry: numbers beyond 64 bits, broken Unicode, deep nesting."""
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot be sent through the queue ({error})") from error


def _strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise Refusal(400, "stop has an empty string, which would end every answer immediately; remove it", "stop")
    return strings
