"""Requests in text or tokens, without a chat: completions, vLLM's generate, tokenize and detokenize."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field

from sluice.pipeline.wire.messages import MAX_ALTERNATIVES
from sluice.producers.gateway import fields
from sluice.producers.gateway.fields import ListedSchema
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.requests import ChatMessage, FormattedOptions, SamplingOptions, StreamOptions
from sluice.producers.http.schemas import MAX_ID_LENGTH, STOP, JsonObject, TokenId

_Ids = Annotated[list[TokenId], STOP]
_MODEL = Field(default="default", description="`default`, or a name that `/v1/models` lists.")
_ROLLOUT = Field(
    default=None,
    min_length=1,
    max_length=MAX_ID_LENGTH,
    description="Makes the call a turn of it; the prompt begins with the tokens of an earlier turn, or forks it.",
)


class CompletionRequest(FormattedOptions):
    """`POST /v1/completions`."""

    unserved = fields.COMPLETION
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "15 times 23 is", "max_tokens": 8}]})

    model: str = _MODEL
    prompt: str | Annotated[list[str], STOP] | _Ids | Annotated[list[_Ids], STOP] = Field(
        description="Text or token ids, or a list of either."
    )
    rollout_id: str | None = _ROLLOUT
    echo: bool | None = Field(default=None, description="The text begins with the prompt's, and `logprobs` too.")
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_ALTERNATIVES, description="Of each token, and of so many of the likeliest."
    )
    add_special_tokens: bool | None = Field(default=None, description="With text; null: true, as in vLLM.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events. With one prompt.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    return_token_ids: bool | None = Field(default=None, description="Add `prompt_token_ids` and `token_ids`.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of `logprobs` `token_id:N` instead of by their text."
    )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, all of one kind."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    @property
    def alternatives(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs or None

    @property
    def of_prompt(self) -> int | None:
        """As `prompt_logprobs` says, or `echo` with `logprobs`."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        check_stream_options(self.stream_options)
        self.check_rollout(self.rollout_id)
        self.check_prompt_logprobs(self.stream)
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise Refusal(400, "prompt has no tokens; send at least one", "prompt")
        if len(self.prompts) > 1 and self.rollout_id is not None:
            raise Refusal(400, "prompt: a rollout's turn has one; send one call for each", "prompt")
        if len(self.prompts) > 1 and self.stream:
            raise Refusal(400, "stream with several prompts is not supported; send one call for each", "stream")


class GenerateSampling(SamplingOptions):
    """vLLM's SamplingParams, as far as they are served."""

    unserved = fields.SAMPLING

    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="Of the sampled tokens; `top_logprobs` has them first, then the likeliest others, so many in all.",
    )

    @property
    def alternatives(self) -> int | None:
        """As `logprobs` says; 0: ranks."""
        return self.logprobs


class GenerateRequest(ListedSchema):
    """`POST /inference/v1/generate`, vLLM's token-in, token-out route."""

    unserved = fields.GENERATE
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"token_ids": [11, 27, 30, 9], "sampling_params": {"max_tokens": 8, "logprobs": 1}}]
        }
    )

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    token_ids: _Ids = Field(min_length=1, description="The prompt.")
    sampling_params: GenerateSampling = Field(default=GenerateSampling(), description="Omitted: the run's.")
    rollout_id: str | None = _ROLLOUT
    request_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Returned; null: one is made."
    )
    return_token_ids: bool | None = Field(default=None, description="Add `prompt_token_ids`.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        check_stream_options(self.stream_options)
        sampling = self.sampling_params
        sampling.check_fields("sampling_params.")
        sampling.check_rollout(self.rollout_id)
        sampling.check_prompt_logprobs(self.stream, "sampling_params.")
        unskipped = (sampling.model_extra or {}).get("skip_special_tokens") is False
        if unskipped and sampling.stop:
            why = "stop strings are searched in text without special tokens; use stop_token_ids"
            path = "sampling_params.skip_special_tokens"
            raise Refusal(400, f"{path} false with stop is not supported: {why}", path)


class TokenizeRequest(ListedSchema):
    """`POST /tokenize`: a text, or messages as a chat completion renders them."""

    unserved = fields.TOKENIZE
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "What is 15 times 23?"}]})

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    prompt: str | None = Field(default=None, description="A text; or send `messages`.")
    messages: Annotated[list[ChatMessage], STOP] | None = Field(
        default=None, min_length=1, description="Without images."
    )
    tools: Annotated[list[JsonObject], STOP] | None = Field(default=None, description="With `messages`.")
    add_generation_prompt: bool | None = Field(default=None, description="With `messages`; null: true.")
    chat_template_kwargs: JsonObject | None = Field(default=None, description="With `messages`.")
    add_special_tokens: bool | None = Field(default=None, description="With `prompt`; null: true, as in vLLM.")
    return_token_strs: bool | None = Field(default=None, description="Add the tokens' own texts.")

    def check(self) -> None:
        """Raises Refusal (400)."""
        self.check_fields()
        if (self.prompt is None) == (self.messages is None):
            raise Refusal(400, "send either prompt or messages", "prompt")
        of_messages: dict[str, Any] = {"tools": self.tools, "add_generation_prompt": self.add_generation_prompt}
        of_messages["chat_template_kwargs"] = self.chat_template_kwargs
        for name, value in of_messages.items():
            if self.messages is None and value is not None:
                raise Refusal(400, f"{name} goes with messages, and this is a prompt; remove it", name)
        if self.messages is not None and self.add_special_tokens:
            why = "the chat template writes its special tokens; remove it"
            raise Refusal(400, f"add_special_tokens with messages is not supported: {why}", "add_special_tokens")


class DetokenizeRequest(ListedSchema):
    """`POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [45, 8]}]})

    model: str | None = Field(default=None, description="`default`, or a name that `/v1/models` lists.")
    tokens: _Ids = Field(description="Token ids.")


def check_stream_options(options: StreamOptions | None) -> None:
    """Raises Refusal (400)."""
    if options is not None:
        options.check_fields("stream_options.")
