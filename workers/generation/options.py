"""Requests, options and results of the offline way in (`GenerationEngine`)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from pipeline.errors import RequestError
from pipeline.messages import FinishReason, Message, SamplingParams
from workers.generation.contracts import EngineFacts


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to decode a batch; greedy unless asked otherwise."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> SamplingParams:
        """The same options as the queue's type. Raises ValueError for a value out of range."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerationOptions:
        """Options from plain values. Raises RequestError for an unknown key or a bad value."""
        for key in values:
            if key not in cls.__struct_fields__:
                near = get_close_matches(key, cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(cls.__struct_fields__)}"
                raise RequestError(f"unknown generation option {key!r}; {hint}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"generation options: {error}") from error


class TextGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: `messages` for the chat template, or token ids that are taken as they are."""

    messages: list[Message] = []
    prompt_token_ids: tuple[int, ...] = ()
    request_id: str = ""

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.prompt_token_ids):
            raise RequestError(f"request {self.request_id!r}: give either messages or prompt_token_ids")


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason` error: nothing was decoded, and `error` says why."""

    request_id: str
    text: str = ""  # cleaned
    raw_text: str = ""  # with special tokens, whole
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []  # raw, nats
    versions: list[int] = []
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    engine: EngineFacts
    fallback: dict[str, str] = {}  # filled only when an explicit fallback backend answered

    @property
    def num_prompt_tokens(self) -> int:
        """Without padding."""
        return len(self.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids)
