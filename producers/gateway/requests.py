"""A chat request as sent, and the part that workers support.

- Omitted or null fields use the run's settings.
- Every other field is refused by name (fields.py).
- Images: images.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, StringConstraints, field_validator

from sluice.pipeline.config.rules import MAX_REWARD_PARTS, REWARD_NAME
from sluice.pipeline.config.types import Config, PolicyConfig
from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, MAX_GROUP, Grammar, Message, RolloutHead, SamplingParams
from sluice.producers.gateway import fields
from sluice.producers.gateway.fields import ListedSchema
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.structured_output import NO_TOOLS, StructuredOutputs, ToolChoice, of_response_format
from sluice.producers.http.schemas import (
    MAX_ID_LENGTH,
    MAX_METADATA_BYTES,
    MAX_TOKENS_LIMIT,
    STOP,
    CompletionsRequest,
    JsonObject,
    TokenId,
)
from sluice.producers.http.schemas import Message as MessageSchema

_MAX_DIGITS = 9  # of a token id


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A conversation, in OpenAI's messages, whatever the API it came by."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Any] = ()
    response_mask: Sequence[int] | None = None
    count: int = 1
    stream: bool | None = False
    rollout_id: str | None = None
    tool_choice: ToolChoice = NO_TOOLS
    template_kwargs: JsonObject = field(default_factory=dict[str, Any])
    logprobs: bool = False  # asked for; a rollout's turns have them anyway

    @property
    def parses_tools(self) -> bool:
        """Whether the answer is parsed for tool calls."""
        return self.tool_choice.parses


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A prompt of token ids."""

    model: str
    token_ids: list[int]
    count: int = 1
    stream: bool | None = False
    rollout_id: str | None = None
    parses_tools: bool = False
    logprobs: bool = False  # as of a ChatCall


class StreamOptions(ListedSchema):
    """What a stream contains besides text."""

    unserved = fields.STREAM

    include_usage: bool = Field(default=False, description="Send one more event before the end, with the token counts.")


class SamplingOptions(ListedSchema):
    """How tokens are sampled, in the names of OpenAI and vLLM. Omitted or null fields use the run's settings."""

    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="1 is off.")
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="-1 and 0 are off.")
    min_p: float | None = Field(default=None, description="0 is off.")
    repetition_penalty: float | None = Field(default=None, description="1 is off.")
    presence_penalty: float | None = Field(default=None, description="0 is off.")
    frequency_penalty: float | None = Field(default=None, description="0 is off.")
    logit_bias: dict[str, float] | None = Field(default=None, description="By token id, added to its logit.")
    allowed_token_ids: Annotated[list[TokenId], STOP] | None = Field(
        default=None, min_length=1, description="Only these are sampled."
    )
    bad_words: Annotated[list[str], STOP] | None = Field(
        default=None, description="Their tokens, alone or after a space, are never completed."
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="What the text must match.")
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description="Of the prompt's tokens, with so many of the likeliest."
    )
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT, description="Tokens per answer.")
    stop: str | Annotated[list[str], STOP] | None = Field(default=None, description="Texts that end the answer.")
    stop_token_ids: Annotated[list[TokenId], STOP] | None = Field(
        default=None, description="Tokens that end the answer."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="The same seed gives the same tokens.")
    n: int | None = Field(default=None, ge=1, le=MAX_GROUP, description="Number of answers; 1 with a `rollout_id`.")

    @property
    def count(self) -> int:
        """The number of answers requested."""
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        """Of an answer; None: the run's."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The likeliest tokens beside each sampled one; 0: its rank alone."""
        return None

    @property
    def of_prompt(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs

    def check_prompt_logprobs(self, stream: bool | None, where: str = "") -> None:
        """Raises Refusal (400) in a stream, as vLLM does."""
        if stream and self.of_prompt is not None:
            path = f"{where}prompt_logprobs"
            raise Refusal(400, f"{path} (or echo with logprobs) goes with whole answers; remove stream", path)

    @property
    def grammar(self) -> Grammar | None:
        """What the text must match; None: the run's. Raises Refusal (400)."""
        return self.structured_outputs and self.structured_outputs.constraint("structured_outputs")

    def check_rollout(self, rollout_id: str | None) -> None:
        """Raises Refusal (400) for a turn that can't be one."""
        if rollout_id is not None and self.count != 1:
            raise Refusal(400, f"n is {self.n}; a rollout's turn has one answer, so remove it", "n")
        if rollout_id is not None and not 1 <= len(rollout_id.strip()) <= MAX_ID_LENGTH:
            raise Refusal(400, f"rollout_id must have 1..{MAX_ID_LENGTH} characters, not all blank", "rollout_id")

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """These options over the run's. Raises Refusal (400) for a value out of range."""
        given = {
            "max_new_tokens": self.most_tokens,
            "temperature": self.temperature,
            "top_k": 1 if self.top_p == 0 else self.top_k,
            "top_p": self.top_p or None,  # 0 means only the likeliest token
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            "grammar": self.grammar,
            "top_logprobs": self.alternatives,
            "prompt_logprobs": self.of_prompt,
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


class FormattedOptions(SamplingOptions):
    """With OpenAI's way to ask for JSON."""

    response_format: JsonObject | None = Field(
        default=None, description="`text`, `json_object`, `json_schema`, or vLLM's `structural_tag`."
    )

    @property
    def grammar(self) -> Grammar | None:
        """Raises Refusal (400), also for two."""
        found = [one for one in (super().grammar, of_response_format(self.response_format)) if one is not None]
        if len(found) > 1:
            raise Refusal(400, "response_format: structured_outputs is there too; remove one", "response_format")
        return found[0] if found else None


class ChatMessage(MessageSchema):
    """A message, with OpenAI's newer name for the system."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]  # type: ignore[assignment]

    def plain(self) -> JsonObject:
        """The message as it came, but for the role: chat templates know no developer."""
        found = super().plain()
        return {**found, "role": "system"} if self.role == "developer" else found


class ChatRequest(FormattedOptions, CompletionsRequest):  # type: ignore[misc]
    """`POST /v1/chat/completions`. Omitted or null fields use the run's settings."""

    unserved = fields.CHAT

    messages: Annotated[list[ChatMessage], STOP] = Field(  # type: ignore[assignment]
        min_length=1, description="The whole conversation so far. The role `developer` is that of `system`."
    )
    rollout_id: str | None = Field(  # type: ignore[assignment]
        default=None,
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Calls with the same id are the turns of one rollout, whose tokens become one training sequence.",
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS_LIMIT, description="OpenAI's newer name for `max_tokens`; takes precedence."
    )
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    logprobs: bool | None = Field(  # type: ignore[assignment]
        default=None,
        description="Compute them: in OpenAI's form for each choice, and at the top level, where a rollout's turns "
        "always have them.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description="The likeliest tokens in each entry of `logprobs`."
    )
    return_token_ids: bool | None = Field(
        default=None, description="vLLM's; the ids of the prompt and the answer are always there."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of `logprobs` `token_id:N` instead of by their text."
    )
    tool_choice: Any = Field(
        default=None,
        description='`"auto"`; `"none"`: calls in the answer stay text; `"required"` or a function: it is calls.',
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call, with a forced `tool_choice`.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="Variables of the chat template.")
    reasoning_effort: str | None = Field(default=None, description="A variable of the chat template.")

    def call(self) -> ChatCall:
        """What is asked. Raises Refusal (400) for values the queue can't carry."""
        return ChatCall(
            self.model,
            self.plain_messages(),
            self.tools or (),
            self.response_mask,
            self.count,
            self.stream,
            self.rollout_id,
            ToolChoice.of(self.tool_choice, self.tools or (), one=self.parallel_tool_calls is False),
            template_kwargs(self.chat_template_kwargs, self.reasoning_effort),
            bool(self.logprobs),
        )

    def plain_messages(self) -> list[Message]:
        """The messages as they came. Raises Refusal (400) for values the queue can't carry."""
        try:
            messages = [message.plain() for message in self.messages]
            check_can_travel(messages)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from error
        return messages

    @property
    def most_tokens(self) -> int | None:
        """The newer name takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As `top_logprobs` says."""
        return self.top_logprobs or None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises Refusal (400) for unsupported options."""
        self.check_fields()
        if self.stream_options is not None:
            self.stream_options.check_fields("stream_options.")
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs goes with logprobs: true; send it", "top_logprobs")
        self.check_prompt_logprobs(self.stream)
        self.check_rollout(self.rollout_id)


RewardName = Annotated[str, StringConstraints(pattern=rf"^{REWARD_NAME}$")]


class FinishRequest(ListedSchema):
    """`POST /v1/rollout/{rollout_id}/finish`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"final_status": "COMPLETED", "reward": 1.0},
                {"final_status": "COMPLETED", "rewards": {"right": 1.0, "short": 0.25}},
            ]
        }
    )

    final_status: Literal["COMPLETED", "ERROR", "CANCELLED"] = Field(description="Only COMPLETED rollouts are trained.")
    reward: float | None = Field(
        default=None, description="Of the whole rollout; null: the sum of `rewards`, or without them the task decides."
    )
    rewards: dict[RewardName, float] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_REWARD_PARTS,
        description="Its parts by name, kept in the metadata of the sequence.",
    )
    truth: Any = Field(default=None, description="For the task; null: the truth the rollout was opened with.")

    @field_validator("truth")
    @classmethod
    def _can_travel(cls, value: Any) -> Any:
        check_can_travel(value)
        return value

    @property
    def total(self) -> float | None:
        """The reward, from its parts if only they were sent. Raises Refusal (400) if the sum isn't finite."""
        if self.reward is not None or self.rewards is None:
            return self.reward
        if not math.isfinite(total := sum(self.rewards.values())):
            raise Refusal(400, "rewards: their sum is not finite; send smaller ones", "rewards")
        return total


class OpenRequest(ListedSchema):
    """`POST /v1/rollouts`. A group is complete once all its members have ended."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"rollout_id": "sums-1:0", "group_id": "sums-1", "group_size": 8, "index": 0, "truth": "1714"}]
        }
    )

    rollout_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Null: a new one is made."
    )
    group_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Of the rollouts that are compared."
    )
    group_size: int = Field(default=1, ge=1, le=MAX_GROUP, description="Rollouts in the group.")
    index: int = Field(default=0, ge=0, lt=MAX_GROUP, description="Its place in the group, from 0.")
    task: str | None = Field(default=None, description="The run's `rollout_matching.task`, or null.")
    truth: Any = Field(default=None, description="For the task.")
    metadata: JsonObject = Field(default={}, description="Kept with the sequence; at most 1 MiB as JSON.")

    @field_validator("truth", "metadata")
    @classmethod
    def _can_travel(cls, value: Any) -> Any:
        check_can_travel(value)
        return value

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: JsonObject) -> JsonObject:
        if (size := len(msgspec.json.encode(value))) > MAX_METADATA_BYTES:
            raise ValueError(f"has {size} bytes as JSON; at most {MAX_METADATA_BYTES}")
        return value

    def head(self, rollout_id: str, config: Config) -> RolloutHead:
        """Raises Refusal (400) for a group or task that the run can't train."""
        self.check_fields()
        task = config.rollout_matching.task
        if self.task not in (None, task):
            raise Refusal(400, f"task: this run's is {task} (rollout_matching.task); send that, or remove it", "task")
        if self.group_id is None and self.group_size > 1:
            raise Refusal(400, f"group_size is {self.group_size}, but there is no group_id; send one", "group_id")
        if self.group_size == 1 and (problem := alone_in_group(config.policy)):
            raise Refusal(400, f"group_size: {problem}", "group_size")
        keep = config.rollout_matching.reward is not None
        try:
            return RolloutHead(
                rollout_id=rollout_id,
                group_id=self.group_id or rollout_id,
                group_size=self.group_size,
                index=self.index,
                task=task,
                truth=self.truth,
                metadata=self.metadata,
                keep_messages=keep,
            )
        except MessageError as error:
            path = "rollout_id" if str(error).startswith("rollout_id") else "index"
            raise Refusal(400, str(error), path) from error


def alone_in_group(policy: PolicyConfig) -> str:
    """Why a group of one trains nothing under this policy; empty if it does."""
    if not policy.enabled or (policy.advantage in ("reward", "reinforce_pp") and not policy.by_pairs):
        return ""
    what = f"policy.loss {policy.loss}" if policy.by_pairs else f"policy.advantage {policy.advantage}"
    return (
        f"{what} compares the rollouts of a group, so a group of one has advantage 0; open them with "
        "POST /v1/rollouts and a group_id, group_size and index, or set policy.advantage to reward"
    )


def unscored(sampling: SamplingParams) -> SamplingParams:
    """The same without the sampled tokens' logprobs, which nobody asked for."""
    return msgspec.structs.replace(sampling, logprobs=False, top_logprobs=None)


def check_can_travel(value: Any) -> None:
    """Raises ValueError for what the queue can't carry: numbers beyond 64 bits, broken Unicode, deep nesting."""
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot be sent through the queue ({error})") from error


def template_kwargs(kwargs: JsonObject | None, effort: str | None = None) -> JsonObject:
    """The template's variables that a request sets. Raises Refusal (400) for values the queue can't carry."""
    given = {**(kwargs or {}), **({} if effort is None else {"reasoning_effort": effort})}
    try:
        check_can_travel(given)
    except ValueError as error:
        raise Refusal(400, f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    return given


def _biases(sent: dict[str, float] | None) -> dict[int, float] | None:
    if sent is None:
        return None
    if odd := next((key for key in sent if not key.isdecimal() or len(key) > _MAX_DIGITS), None):
        raise Refusal(400, f"logit_bias: {odd!r:.80} is not a token id; correct it", "logit_bias")
    return {int(key): bias for key, bias in sent.items()}


def _strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise Refusal(400, "stop has an empty string, which would end every answer immediately; remove it", "stop")
    return strings
