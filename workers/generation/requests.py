"""Requests and results of the offline way in (`GenerationEngine`)."""

from __future__ import annotations

from operator import index
from typing import Any

import msgspec

from pipeline.errors import RequestError
from pipeline.wire.messages import FinishReason, Message
from workers.generation.contracts import EngineFacts


class TextGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: `messages` for the chat template, or token ids that are taken as they are."""

    messages: list[Message] = []
    prompt_token_ids: tuple[int, ...] = ()
    request_id: str = ""

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.prompt_token_ids):
            raise RequestError(f"request {self.request_id!r}: give either messages or prompt_token_ids")
        try:
            msgspec.structs.force_setattr(self, "prompt_token_ids", tuple(map(index, self.prompt_token_ids)))
        except TypeError as error:
            raise RequestError(f"request {self.request_id!r}: prompt_token_ids are whole numbers; {error}") from error


class VlmGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with exactly one image; the messages say by an image part where it belongs.

    An image is a path, encoded bytes or a `PIL.Image.Image`.
    """

    messages: list[Message]
    images: tuple[Any, ...]
    request_id: str = ""

    def __post_init__(self) -> None:
        if not self.messages:
            raise RequestError(f"request {self.request_id!r}: messages is empty; give at least one message")
        if len(self.images) != 1:
            raise RequestError(f"request {self.request_id!r}: exactly one image is supported, got {len(self.images)}")


GenerationRequest = TextGenerationRequest | VlmGenerationRequest


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason` error: nothing was decoded, and `error` says why."""

    request_id: str
    text: str = ""  # cleaned
    raw_text: str = ""  # with special tokens, whole
    prompt_token_ids: list[int] = []  # as the model saw them: image placeholders expanded, no padding
    prompt_truncated: int = 0  # tokens that `truncate_prompt` cut from the left
    token_ids: list[int] = []
    response_mask: list[int] = []  # 1 = sampled; empty = all ones; 0 for an end that the repeat guard forced
    logprobs: list[float] = []  # raw, nats
    versions: list[int] = []
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    triggers: dict[str, Any] = {}  # repeat_terminate and active, 0|1 each; rule, at_token; empty for an error
    error: str | None = None
    engine: EngineFacts
    fallback: dict[str, str] = {}  # filled only when an explicit fallback backend answered

    @property
    def num_prompt_tokens(self) -> int:
        """Without padding."""
        return len(self.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens, a forced end among them."""
        return len(self.token_ids)
