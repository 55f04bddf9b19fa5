"""One row of the output: a sequence, or why there is none."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeline.errors import SluiceError
from pipeline.prompts.rows import Malformed
from pipeline.wire.messages import FinishReason
from workers.generation.contracts import EngineFacts
from workers.generation.requests import GenerationResult

MINIMAL = ("id", "row", "index", "text", "finish_reason", "error", "num_new_tokens")


class EngineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine answered."""

    backend: str
    version: str
    model: str
    dtype: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. `finish_reason` error: nothing was decoded, and `error` says why."""

    id: str | int | None = None  # the prompt's own
    row: int  # of the prompt in its file, from 0; blank lines are no rows
    index: int = 0  # of the sequence among the n of its prompt
    text: str = ""
    raw_text: str = ""  # with special tokens, whole
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    triggers: dict[str, Any] = {}  # of the repeat guard, as in `GenerationResult`
    error: str | None = None
    token_ids: list[int] = []
    response_mask: list[int] = []  # empty = all ones
    logprobs: list[float] = []  # raw, nats
    prompt_token_ids: list[int] = []
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    prompt_truncated: int = 0  # tokens cut from the prompt's left
    metadata: dict[str, Any] = {}  # the prompt's own
    engine: EngineNote | None = None  # None: no engine was asked
    fallback: dict[str, str] | None = None  # wanted, used, reason: another backend answered

    @classmethod
    def of(cls, row: int, index: int, result: GenerationResult, *, id: str | int | None, metadata: Any) -> Answer:
        """The answer of an engine."""
        names = ("text", "raw_text", "finish_reason", "stop_reason", "triggers", "error", "token_ids", "logprobs")
        more = ("response_mask", "prompt_token_ids", "num_prompt_tokens", "num_new_tokens", "prompt_truncated")
        taken = {name: getattr(result, name) for name in (*names, *more)}
        fallback = result.fallback or None
        return cls(
            id=id, row=row, index=index, metadata=metadata, engine=_note(result.engine), fallback=fallback, **taken
        )

    @classmethod
    def refused(cls, row: int, index: int, malformed: Malformed) -> Answer:
        """The answer to a row that could not be read."""
        return cls(row=row, index=index, finish_reason="error", error=str(malformed.error()))

    @classmethod
    def failed(cls, row: int, index: int, error: SluiceError, *, id: str | int | None, metadata: Any) -> Answer:
        """The answer to a row that no engine here can take."""
        return cls(id=id, row=row, index=index, metadata=metadata, finish_reason="error", error=f"row {row}: {error}")

    def line(self, fields: Literal["minimal", "all"]) -> bytes:
        """JSON with its newline."""
        chosen = self if fields == "all" else {name: getattr(self, name) for name in MINIMAL}
        return msgspec.json.encode(chosen) + b"\n"


def _note(facts: EngineFacts) -> EngineNote:
    return EngineNote(backend=facts.name, version=facts.engine_version, model=facts.model, dtype=facts.dtype)
