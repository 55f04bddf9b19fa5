"""One sequence while it is decoded: its tokens so far and what ends it."""

from __future__ import annotations

import math
import time
from typing import Any

from pipeline.errors import EngineError
from workers.generation.contracts import (
    DecodeEnding,
    EngineFacts,
    SequenceOutput,
    SequenceRequest,
    SequenceSoFar,
    check_request,
)
from workers.generation.stop_policy import StopReason, StopStrings, end_reasons, final_texts, text_decoder


class Row:
    """A running sequence. `tokens`, `logprobs` and `versions` have one length."""

    __slots__ = (
        "_ends",
        "_limit",
        "_reported",
        "_watch",
        "finish_reason",
        "logprobs",
        "prompt",
        "request",
        "stop_reason",
        "tokens",
        "versions",
    )

    def __init__(self, request: SequenceRequest, tokenizer: Any, facts: EngineFacts) -> None:
        """Raises RequestError for a request that the engine cannot decode whole."""
        check_request(request, facts)
        sampling = request.sampling
        self.request = request
        self.prompt = list(request.prompt_token_ids)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: DecodeEnding | None = None
        self.stop_reason: StopReason = None
        self._limit = sampling.max_new_tokens
        self._reported = 0
        self._ends = end_reasons(tokenizer, facts.eos_token_ids, sampling.stop_token_ids, sampling.stop)
        self._watch = StopStrings(sampling.stop, text_decoder(tokenizer)) if sampling.stop else None

    @property
    def context(self) -> list[int]:
        """What a prefill has to see."""
        return self.prompt + self.tokens

    def push(self, token: int, logprob: float, version: int) -> bool:
        """Take the next token; True if the sequence ends with it. Raises EngineError for a NaN."""
        if math.isnan(logprob):
            raise EngineError(
                f"{self.request.seq_key}: the model gave NaN at token {len(self.tokens)}; check its weights"
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self._ends:
            self._end("stop", self._ends[token])
        elif self._watch is not None and (found := self._watch.push(token)) is not None:
            self._end("stop", found)
        elif len(self.tokens) >= self._limit:
            self._end("length", None)
        elif self.request.deadline_at is not None and time.monotonic() > self.request.deadline_at:
            self._end("deadline", None)
        elif self.request.report_every and len(self.tokens) - self._reported >= self.request.report_every:
            self._report()
        return self.finish_reason is not None

    def _report(self) -> None:
        """Tell the caller what is new."""
        at, self._reported = self._reported, len(self.tokens)
        if self.request.report is not None:
            self.request.report(SequenceSoFar(at, self.tokens[at:], self.logprobs[at:], self.versions[at:]))

    def output(self, tokenizer: Any) -> SequenceOutput:
        """The result of a sequence that has ended. Raises EngineError for one that has not."""
        if self.finish_reason is None:
            raise EngineError(f"{self.request.seq_key}: asked for its output before it ended")
        text, raw_text = final_texts(tokenizer, self.tokens, self.request.sampling.stop)
        return SequenceOutput(
            seq_key=self.request.seq_key,
            token_ids=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            text=text,
            raw_text=raw_text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _end(self, reason: DecodeEnding, detail: StopReason) -> None:
        self.finish_reason = reason
        self.stop_reason = detail
