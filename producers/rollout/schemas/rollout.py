"""A rollout as it is asked for and answered."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, SecretStr, field_validator
from yarl import URL

from producers.rollout.schemas.constants import (
    MAX_ID_LENGTH,
    MAX_METADATA_BYTES,
    MAX_NAME_LENGTH,
    MAX_TOTAL_TOKENS_LIMIT,
    MAX_TURNS_LIMIT,
    STOP,
    JsonObject,
    Schema,
)
from producers.rollout.schemas.messages import Message
from producers.rollout.schemas.params import SamplingParams

FinishReason = Literal["stop", "max_turns", "max_tokens", "error"]
ErrorCategory = Literal[
    "tokenizer_error",
    "network_error",
    "timeout",
    "rate_limited",
    "trainer_server_error",
    "trainer_client_error",
    "tool_error",
    "validation_error",
    "mask_error",
    "internal_error",
]
TURN_HINTS = ("max_assistant_turns", "max_user_turns")
"""Keys of `metadata` that bound the replies, and the rounds of tool calls."""


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "COMPLETED"
    ERROR = "ERROR"


class RolloutRequest(Schema):
    """What a trainer asks for. `max_turns` and `max_tokens_total` are advice; this server follows it."""

    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH, description="The same id never runs twice.")
    server_url: str = Field(description="Where the model is: http or https, of a listed host.")
    messages: Annotated[list[Message], STOP] = Field(min_length=1, description="What the rollout begins with.")
    sampling_params: SamplingParams = Field(default=SamplingParams(), description="Of every reply.")
    tokenizer_name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH, description="One that the server lists.")
    tokenizer_revision: str | None = Field(
        default=None, max_length=MAX_NAME_LENGTH, description="Where the server's list has a hub's model."
    )
    tool_server_url: str | None = Field(default=None, description="An MCP server whose tools this rollout has too.")
    max_turns: int = Field(default=10, ge=1, le=MAX_TURNS_LIMIT, description="Replies of the model, at most.")
    max_tokens_total: int = Field(
        default=8192, ge=1, le=MAX_TOTAL_TOKENS_LIMIT, description="Of the longest context, replies included."
    )
    metadata: JsonObject = Field(
        default={}, description="At most 1 MiB. `max_assistant_turns` and `max_user_turns` in it are bounds too."
    )
    callback_api_key: Annotated[SecretStr | None, Field(description="Sent to `server_url` as the bearer key.")] = None

    @field_validator("rollout_id")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is blank; give an id")
        return value

    @field_validator("server_url", "tool_server_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        return None if value is None else _plain_url(value)

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: JsonObject) -> JsonObject:
        try:
            size = len(msgspec.json.encode(value))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"cannot be written as JSON ({error})") from error
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"has {size} bytes as JSON; at most {MAX_METADATA_BYTES}")
        for hint in TURN_HINTS:
            turns = value.get(hint)
            if turns is not None and (type(turns) is not int or turns < 1):
                raise ValueError(f"{hint} must be a whole number >= 1, or null")
        return value

    @field_validator("callback_api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        secret = "x" if value is None else value.get_secret_value()
        if not (secret.isascii() and secret.isprintable() and secret.strip() == secret != ""):
            raise ValueError("must be printable ASCII without blanks around it, or null")
        return value

    def turn_limits(self) -> tuple[int, int]:
        """Most replies, and most rounds of tool calls."""
        hints: list[Any] = [self.metadata.get(hint) or self.max_turns for hint in TURN_HINTS]
        return min(self.max_turns, hints[0]), hints[1]


class RolloutMetrics(Schema):
    """Counts and times of one rollout."""

    total_latency_ms: float = Field(default=0.0, description="Of the whole rollout.")
    llm_latency_ms: float = Field(default=0.0, description="Of all calls of the model together.")
    tool_latency_ms: float = Field(default=0.0, description="Of the tools, turn by turn.")
    num_llm_calls: int = Field(default=0, description="Turns handed to training.")
    num_tool_calls: int = 0
    prompt_tokens: int = Field(default=0, description="Of all calls together.")
    response_tokens: int = 0
    max_context_tokens: int = Field(default=0, description="Prompt and reply of the longest call.")


class RolloutResponse(Schema):
    """The answer to every rollout, also to one that failed: then `final_messages` is empty."""

    rollout_id: str
    status: Annotated[RolloutStatus, Field(strict=False)]
    final_messages: Annotated[list[Message], STOP] = Field(default_factory=list, description="The whole conversation.")
    finish_reason: FinishReason | None = None
    error_message: str | None = Field(default=None, description="Why it failed, in words.")
    metrics: RolloutMetrics = Field(default_factory=RolloutMetrics)
    extra_fields: JsonObject = Field(
        default_factory=dict, description="error_category, http_status; template_drift, resyncs."
    )


class InitResponse(Schema):
    """`POST /v1/rollout/init`."""

    rollout_id: str
    tools: Annotated[list[JsonObject], STOP]


class RunState(StrEnum):
    """Where a rollout is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class StatusResponse(Schema):
    """`GET /rollout/{id}/status`, `POST /rollout/cancel`."""

    rollout_id: str
    status: Annotated[RunState, Field(strict=False)]


class CancelRequest(Schema):
    """`POST /rollout/cancel`."""

    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)


def _plain_url(text: str) -> str:
    """Without the slash at its end."""
    try:
        url = URL(text)
    except (ValueError, IndexError) as error:
        raise ValueError("is no URL") from error
    if url.scheme not in ("http", "https") or not url.raw_host:
        raise ValueError("must be an http or https URL")
    if url.raw_user is not None or url.raw_password is not None or url.query_string or url.fragment:
        raise ValueError("must have no user, password, query or fragment")
    return text.rstrip("/")
