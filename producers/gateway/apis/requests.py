"""What the requests of several APIs share: sampling options, what the text must match, messages, and the rollout.

- Omitted or null fields use the run's settings.
- Every other field is refused by name (fields.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import msgspec
from pydantic import Field

from sluice.pipeline.wire.messages import MAX_ALTERNATIVES, MAX_GROUP, Grammar, GrammarKind, SamplingParams
from sluice.producers.gateway.apis import fields
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.parsers import grammar
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.http.schemas import MAX_ID_LENGTH, MAX_TOKENS_LIMIT, STOP, JsonObject, TokenId
from sluice.producers.http.schemas import Message as MessageSchema

_MAX_DIGITS = 9  # of a token id

Ids = Annotated[list[TokenId], STOP]
MODEL = Field(default="default", description="`default`, or a name that `/v1/models` lists.")
TURN_OF = Field(
    default=None,
    min_length=1,
    max_length=MAX_ID_LENGTH,
    description="Makes the call a turn of it; the prompt begins with the tokens of an earlier turn, or forks it.",
)

_KINDS: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


class StructuredOutputs(ListedSchema):
    """vLLM's: one of these."""

    unserved = fields.STRUCTURED

    json_: str | JsonObject | bool | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: str | None = None
    choice: Annotated[list[str], STOP] | None = Field(default=None, description="One of these texts.")
    grammar: str | None = Field(default=None, description="EBNF, as xgrammar reads it.")
    structural_tag: str | JsonObject | None = Field(default=None, description="xgrammar's.")

    def constraint(self, where: str) -> Grammar:
        """Raises Refusal (400)."""
        self.check_fields(f"{where}.")
        sent = self.model_dump(mode="json", by_alias=True, include={"json_", *_KINDS})
        given = {name: value for name, value in sent.items() if value not in (None, False)}
        if len(given) != 1:
            raise Refusal(400, f"{where} must have exactly one of {', '.join(_KINDS)}; it has {len(given)}", where)
        [(name, value)] = given.items()
        return grammar(_KINDS[name], "" if name == "json_object" else value, f"{where}.{name}")


def of_response_format(form: JsonObject | None, where: str = "response_format") -> Grammar | None:
    """OpenAI's `text`, `json_object`, `json_schema`, and vLLM's `structural_tag`. Raises Refusal (400)."""
    if form is None:
        return None
    kind, known = form.get("type"), {"type"}
    found: Grammar | None = None
    if kind == "json_object":
        found = grammar("json_object", "", where)
    elif kind == "json_schema":
        nested, known = form.get("json_schema"), {"type", "json_schema"}
        if "schema" in form and nested is None:  # as OpenAI's responses write it
            nested, known = form, {"type", "name", "description", "strict", "schema"}
        if not isinstance(nested, dict) or not isinstance(nested.get("schema"), dict | bool):
            raise Refusal(400, f"{where}.json_schema: needs a schema", f"{where}.json_schema")
        _only(nested, {"type", "name", "description", "strict", "schema"}, f"{where}.json_schema")
        found = grammar("json_schema", nested["schema"], f"{where}.json_schema")
    elif kind == "structural_tag":
        return grammar("structural_tag", form, where)
    elif kind != "text":
        message = f"{where}.type: {kind!r:.80} is not one of text, json_object, json_schema, structural_tag; correct it"
        raise Refusal(400, message, f"{where}.type")
    _only(form, known, where)
    return found


def _only(form: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(form.keys() - known):
        path = f"{where}.{unknown[0]:.80}"
        raise Refusal(400, f"{path} is not a field of this request; remove it", path)


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


class InRollout(Protocol):
    """A request that may be a turn of a rollout."""

    rollout_id: str | None

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """The same with other values."""
        ...


RequestT = TypeVar("RequestT", bound=InRollout)


def in_rollout(
    body: RequestT, *, header: str | None = None, url: str | None = None, conversation: str | None = None
) -> RequestT:
    """The request with the rollout that its URL, header, body or earlier response names.

    Raises Refusal (400) if they differ.
    """
    named = {name for name in (url, header, body.rollout_id, conversation) if name is not None}
    if len(named) > 1:
        message = "rollout_id: the URL, the header X-Rollout-Id and the body name different rollouts; send one"
        if conversation is not None:
            message = "rollout_id: previous_response_id is of another rollout; send the conversation as input"
        raise Refusal(400, message, "rollout_id")
    return body.model_copy(update={"rollout_id": named.pop()}) if named else body


def check_stream_options(options: StreamOptions | None) -> None:
    """Raises Refusal (400)."""
    if options is not None:
        options.check_fields("stream_options.")


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
