"""How the model samples."""

from __future__ import annotations

from pydantic import Field

from producers.rollout.schemas.constants import MAX_TOKENS_LIMIT, OpenSchema


class SamplingParams(OpenSchema):
    """Options of every call of a rollout; what is not listed goes to the trainer as it is."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    max_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS_LIMIT)
    stop: list[str] | None = None
    logprobs: bool = True
