"""The messages between a trainer, the gateway and the rollout server over HTTP; their names are a public protocol.

```
RolloutRequest ─▶ rollout server ─ CompletionsRequest ─▶ trainer (gateway) ─ CompletionsResponse ─▶ … ─▶ RolloutResponse
```

- Messages and tools have OpenAI's format.
- `response_mask` covers the tokens a call adds before the reply: 0 for each, null if there are none.
- A reply reports its prompt (`prompt_token_ids`) and the sampled tokens (`token_ids`; `logprobs`, natural logs).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field, SecretStr, field_validator, model_validator
from starlette.convertors import Convertor, register_url_convertor
from yarl import URL

from sluice.pipeline.errors import SluiceError

Role = Literal["system", "user", "assistant", "tool", "function"]
VALID_MESSAGE_ROLES: tuple[str, ...] = get_args(Role)

MAX_ID_LENGTH = 256
MAX_NAME_LENGTH = 256
MAX_TOKENS_LIMIT = 32_768  # of one reply
MAX_TOTAL_TOKENS_LIMIT = 1_000_000  # of one context
MAX_TURNS_LIMIT = 100
MAX_METADATA_BYTES = 1024 * 1024


class _StopAtFirst(FailFast):
    """FailFast that also works in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


STOP = _StopAtFirst()
"""Of a list: the first item that is wrong is the answer. A million complaints cost more than a million items."""

NUM_TURNS = "Calls that were answered; a rollout with fewer has lost turns, and isn't trained. Null: not counted."

JsonObject = dict[str, Any]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Schema(BaseModel):
    """Strict types (no "1" for 1), finite numbers only."""

    # A number that JSON lacks stays what it is in a field of any type, and can't be encoded: not null in silence.
    model_config = ConfigDict(strict=True, allow_inf_nan=False, ser_json_inf_nan="constants", hide_input_in_errors=True)


class OpenSchema(Schema):
    """Keeps unknown fields."""

    model_config = ConfigDict(extra="allow")


class SamplingParams(OpenSchema):
    """Options of every call of a rollout; unlisted ones are passed to the trainer unchanged."""

    temperature: float = Field(default=1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(default=1.0, ge=0, le=1, description="1 is off.")
    max_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS_LIMIT, description="Tokens per reply.")
    stop: Annotated[list[str], STOP] | None = Field(default=None, description="Texts that end a reply.")
    logprobs: bool = Field(default=True, description="Request them from the model; training needs them.")


class FunctionCall(OpenSchema):
    """What to call; arguments are an object, or its JSON."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    arguments: str | JsonObject


class ToolCall(OpenSchema):
    """One call requested by the model."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(OpenSchema):
    """One message; unlisted fields are kept."""

    role: Role
    content: str | Annotated[list[JsonObject], STOP] | None = Field(
        default=None, description="Text, or a list of OpenAI's parts."
    )
    tool_calls: Annotated[list[ToolCall], STOP] | None = Field(
        default=None, description="The calls of an assistant's message."
    )
    tool_call_id: str | None = Field(
        default=None, max_length=MAX_ID_LENGTH, description="The call that a tool's message answers."
    )

    def plain(self) -> JsonObject:
        """The message as it came: fields that were not sent stay out."""
        return self.model_dump(mode="json", exclude_unset=True)


class FunctionDefinition(OpenSchema):
    """A function's name, what it is for, and the JSON Schema of its arguments."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    description: str | None = None
    parameters: JsonObject = {}


class ToolDefinition(OpenSchema):
    """A tool as described to the model."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ToolsResponse(Schema):
    """`GET /tools`."""

    tools: Annotated[list[JsonObject], STOP]


MaskValue = Annotated[int, Field(ge=0, le=1)]


class CompletionsRequest(SamplingParams):
    """One call of a rollout."""

    model: str = Field(default="default", description="`default`, or a name that `/v1/models` lists.")
    messages: Annotated[list[Message], STOP] = Field(min_length=1, description="The whole conversation so far.")
    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    response_mask: Annotated[list[MaskValue], STOP] | None = Field(
        default=None, description="A 0 for each token that this call adds to its rollout; checked if given."
    )
    tools: Annotated[list[JsonObject], STOP] | None = Field(
        default=None, description="Function schemas, for the chat template."
    )


class CompletionsChoice(OpenSchema):
    """The one reply."""

    index: int = 0
    message: Message
    finish_reason: str | None = Field(default=None, description="`stop`, `length` or `tool_calls`.")


class CompletionsResponse(OpenSchema):
    """What the trainer answers; shapes: token_ids and logprobs (response_len,), prompt_token_ids (prompt_len,)."""

    id: str = ""
    object: str = "chat.completion"
    created: int = 0
    model: str = "default"
    choices: Annotated[list[CompletionsChoice], STOP] = Field(min_length=1)
    token_ids: Annotated[list[TokenId], STOP] = Field(description="The sampled tokens.")
    logprobs: Annotated[list[float], STOP] = Field(description="One per token of `token_ids`: natural logarithms.")
    prompt_token_ids: Annotated[list[TokenId], STOP] = Field(
        min_length=1, description="The prompt as the model saw it."
    )

    @model_validator(mode="after")
    def _fits(self) -> CompletionsResponse:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"logprobs has {len(self.logprobs)} values for {len(self.token_ids)} token_ids")
        if self.choices[0].message.role != "assistant":
            raise ValueError(f"choices.0.message.role is {self.choices[0].message.role}, not assistant")
        return self


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
    """A trainer's request. `max_turns` and `max_tokens_total` are advisory; this server applies them."""

    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH, description="The same id never runs twice.")
    server_url: str = Field(description="URL of the model: http or https, on a listed host.")
    messages: Annotated[list[Message], STOP] = Field(min_length=1, description="The first messages of the rollout.")
    sampling_params: SamplingParams = Field(default=SamplingParams(), description="Applied to every reply.")
    tokenizer_name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH, description="One of the server's list.")
    tokenizer_revision: str | None = Field(
        default=None, max_length=MAX_NAME_LENGTH, description="Only for a Hub model in the server's list."
    )
    tool_server_url: str | None = Field(default=None, description="An MCP server with more tools for this rollout.")
    max_turns: int = Field(default=10, ge=1, le=MAX_TURNS_LIMIT, description="Limit on the model's replies.")
    max_tokens_total: int = Field(
        default=8192, ge=1, le=MAX_TOTAL_TOKENS_LIMIT, description="Limit on the longest context, replies included."
    )
    metadata: JsonObject = Field(
        default={}, description="At most 1 MiB. `max_assistant_turns` and `max_user_turns` in it are limits too."
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
                raise ValueError(f"{hint} must be an integer >= 1, or null")
        return value

    @field_validator("callback_api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        secret = "x" if value is None else value.get_secret_value()
        if not (secret.isascii() and secret.isprintable() and secret.strip() == secret != ""):
            raise ValueError("must be printable ASCII without surrounding blanks, or null")
        return value

    def turn_limits(self) -> tuple[int, int]:
        """The maximum number of replies, and of rounds of tool calls."""
        hints: list[Any] = [self.metadata.get(hint) or self.max_turns for hint in TURN_HINTS]
        return min(self.max_turns, hints[0]), hints[1]


class RolloutMetrics(Schema):
    """Counts and times of one rollout."""

    total_latency_ms: float = Field(default=0.0, description="Of the whole rollout.")
    llm_latency_ms: float = Field(default=0.0, description="Sum of all model calls.")
    tool_latency_ms: float = Field(default=0.0, description="Sum over the turns.")
    num_llm_calls: int = Field(default=0, description="Turns handed to training.")
    num_tool_calls: int = 0
    prompt_tokens: int = Field(default=0, description="Sum of all model calls.")
    response_tokens: int = 0
    max_context_tokens: int = Field(default=0, description="Prompt and reply of the longest call.")


class RolloutResponse(Schema):
    """The answer to every rollout; if it failed, `final_messages` is empty."""

    rollout_id: str
    status: Annotated[RolloutStatus, Field(strict=False)]
    final_messages: Annotated[list[Message], STOP] = Field(default_factory=list, description="The whole conversation.")
    finish_reason: FinishReason | None = None
    error_message: str | None = Field(default=None, description="Why it failed.")
    reward: float | None = Field(default=None, description="Of the whole rollout; null: the task decides.")
    num_turns: int | None = Field(default=None, ge=0, description=NUM_TURNS)
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
    """`GET /rollout/{id}/status`, `POST /rollout/cancel`, `POST /rollout/forget`."""

    rollout_id: str
    status: Annotated[RunState, Field(strict=False)]


class NamedRollout(Schema):
    """`POST /rollout/cancel`, `POST /rollout/forget`."""

    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)


def _plain_url(text: str) -> str:
    """The URL without a trailing slash."""
    try:
        url = URL(text)
    except (ValueError, IndexError) as error:
        raise ValueError("is not a URL") from error
    if url.scheme not in ("http", "https") or not url.raw_host:
        raise ValueError("must be an http or https URL")
    if url.raw_user is not None or url.raw_password is not None or url.query_string or url.fragment:
        raise ValueError("must have no user, password, query or fragment")
    return text.rstrip("/")


class RolloutError(SluiceError):
    """Ends one rollout with status ERROR; `http_status` is the trainer's, if there is one."""

    def __init__(self, category: ErrorCategory, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.category, self.http_status = category, http_status


ROLLOUT_ID = "{rollout_id:any}"


class AnyText(Convertor[str]):
    """An id in a path: any text, even slashes and line ends (`{name:path}` accepts no line ends)."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """From the path."""
        return value

    def to_string(self, value: str) -> str:
        """To the path."""
        return value


register_url_convertor("any", AnyText())
