"""The callback to the trainer, and its reply: OpenAI's chat completions, with token ids.

- `response_mask` covers the tokens that this call adds before the reply: 0 for each, null for none.
- A reply says what it saw (`prompt_token_ids`) and what it sampled (`token_ids`, `logprobs`: natural logs, one each).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from producers.rollout.schemas.constants import MAX_ID_LENGTH, STOP, JsonObject, OpenSchema, TokenId
from producers.rollout.schemas.messages import Message
from producers.rollout.schemas.params import SamplingParams

MaskValue = Annotated[int, Field(ge=0, le=1)]


class CompletionsRequest(SamplingParams):
    """One call of a rollout."""

    model: str = Field(default="default", description="`default`, or a name that `/v1/models` lists.")
    messages: Annotated[list[Message], STOP] = Field(min_length=1, description="The whole conversation so far.")
    rollout_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    response_mask: Annotated[list[MaskValue], STOP] | None = Field(
        default=None, description="A 0 for each token that this call adds to its rollout; checked where it is sent."
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
    token_ids: Annotated[list[TokenId], STOP] = Field(description="What was sampled.")
    logprobs: Annotated[list[float], STOP] = Field(description="Of `token_ids`, one each: natural logarithms.")
    prompt_token_ids: Annotated[list[TokenId], STOP] = Field(min_length=1, description="What the model was given.")

    @model_validator(mode="after")
    def _fits(self) -> CompletionsResponse:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"logprobs has {len(self.logprobs)} values for {len(self.token_ids)} token_ids")
        if self.choices[0].message.role != "assistant":
            raise ValueError(f"choices.0.message.role is {self.choices[0].message.role}, not assistant")
        return self
