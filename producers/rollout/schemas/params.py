"""How the model samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from producers.rollout.schemas.constants import MAX_TOKENS_LIMIT, STOP, OpenSchema


class SamplingParams(OpenSchema):
    """Options of every call of a rollout; what is not listed goes to the trainer as it is."""

    temperature: float = Field(default=1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(default=1.0, ge=0, le=1, description="1 is off.")
    max_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS_LIMIT, description="Of one reply.")
    stop: Annotated[list[str], STOP] | None = Field(default=None, description="Texts that end a reply.")
    logprobs: bool = Field(default=True, description="Asked of the model; training needs them.")
