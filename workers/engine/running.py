"""One sequence being decoded: its tokens so far and what ends it; the same on every backend.

The stop policy, defined only here:

- Order within one token: end-of-sequence ids and stop ids, then stop strings, then length.
- A stop string that is a single token also acts as a stop id; every stop string is also searched for in the text.
- A sequence ends at the first token that completes a stop string; that token is kept, nothing after it.
- Stop strings are searched for in the text without special tokens, the same as in the cleaned text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sluice.pipeline.errors import EngineError
from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.pipeline.wire.messages import Progress
from sluice.pipeline.wire.sampled_tokens import Place, Ranked, SampledTokens
from sluice.workers.engine.constraints import Constraint, Grammars, Narrowed
from sluice.workers.engine.contracts import DecodeEnding, EngineFacts, SequenceOutput, SequenceRequest, check_request
from sluice.workers.guard.repeat import RepeatTrigger

StopReason = str | int | None
_MAX_HELD_TOKENS = 8
"""Tokens after which an unfinished character counts as broken bytes; a character has at most 4 bytes."""


class RunningSequence:
    """`sampled` begins with the request's `so_far`; `tokens` are its ids, the same list object."""

    __slots__ = (
        "_ends",
        "_limit",
        "_reported",
        "_scored",
        "_watch",
        "cached_tokens",
        "eos",
        "finish_reason",
        "first_token_at",
        "logprob_temperature",
        "narrowed",
        "prompt",
        "prompt_ranked",
        "request",
        "sampled",
        "stop_reason",
        "tokenizer",
        "tokens",
        "trigger",
    )

    def __init__(
        self,
        request: SequenceRequest,
        tokenizer: Any,
        facts: EngineFacts,
        prompt: Sequence[int] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`prompt` as the model sees it, if different from the request's. `grammars`: for a request with a constraint.

        Raises RequestError for a bad request.

        May have ended already, if `so_far` holds a whole sequence.
        """
        self.prompt = list(request.prompt_token_ids if prompt is None else prompt)
        check_request(request, facts, self.prompt)
        sampling = request.sampling
        self.request = request
        processed = facts.logprobs_mode == "processed_logprobs"
        self.logprob_temperature = (sampling.temperature or 1.0) if processed else 1.0
        self.sampled = SampledTokens()
        self.tokens = self.sampled.token_ids
        self.finish_reason: DecodeEnding | None = None
        self.stop_reason: StopReason = None
        self.trigger: RepeatTrigger | None = None
        self.prompt_ranked: Ranked | None = None
        self.cached_tokens = 0  # of the prompt, at its first prefill
        self.tokenizer = tokenizer
        self.first_token_at = 0.0  # Unix seconds, of the first one that is decoded here
        self._limit, self._scored = sampling.max_new_tokens, sampling.logprobs
        self.eos = facts.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids
        self._ends = end_reasons(tokenizer, self.eos, sampling.stop_token_ids, sampling.stop)
        constraint = Constraint.of(sampling, tokenizer, self.eos)
        self.narrowed = None
        if constraint is not None:
            self.narrowed = Narrowed(constraint, grammars or Grammars(lambda: tokenizer, facts.vocab_size))
        self._watch = StopStrings(sampling.stop, TextDecoder(tokenizer)) if sampling.stop else None
        self._replay()
        self._reported = len(self.tokens)

    @property
    def context(self) -> list[int]:
        """The token ids a prefill has to process."""
        return self.prompt + self.tokens

    @property
    def end_token_ids(self) -> list[int]:
        """Ids that end the sequence: end of sequence, stop ids, single-token stop strings."""
        return list(self._ends)

    @property
    def watches_text(self) -> bool:
        """Something other than ids and length can end it, so it must be checked token by token."""
        return self._watch is not None

    @property
    def wants_prompt(self) -> bool:
        """Whether the prompt's logprobs are asked for, and not known yet."""
        return self.request.sampling.prompt_logprobs is not None and self.prompt_ranked is None

    def push(self, token: int, logprob: float | None, version: int, place: Place | None = None) -> bool:
        """Take the next token; True if it ends the sequence. `logprob` None: not known, and not asked for.

        Raises EngineError for a NaN, RequestError for a token that the request excludes.
        """
        if not self.first_token_at:
            self.first_token_at = time.time()
        self._take(token, logprob, version, place)
        request = self.request
        if self.finish_reason is None:
            if request.deadline_at is not None and time.monotonic() > request.deadline_at:
                self.end("deadline")
            elif request.report_every and len(self.tokens) - self._reported >= request.report_every:
                self._report()
        return self.finish_reason is not None

    def unscored(self, version: int, parent: int | None = None) -> list[int]:
        """As `SampledTokens.unscored`."""
        return self.sampled.unscored(version, parent)

    def score(self, version: int, at: Sequence[int], logprobs: Sequence[float]) -> None:
        """Set the proximal logprobs of the tokens `at`, from `unscored(version)`. Raises EngineError for a NaN."""
        for token, logprob in zip(at, logprobs, strict=True):
            self._check(logprob, token)
            self.sampled.score(token, logprob, version)

    def end(self, reason: DecodeEnding, detail: StopReason = None) -> None:
        """One that is cancelled may go on elsewhere, so its last tokens are reported too."""
        if reason == "cancelled" and len(self.tokens) > self._reported:
            self._report()
        self.finish_reason = reason
        self.stop_reason = detail

    def end_loop(self, trigger: RepeatTrigger) -> None:
        """End it for the repeat guard: appends the first configured end-of-sequence id, which wasn't sampled."""
        if trigger.at_token != len(self.tokens):
            raise EngineError(
                f"{self.request.seq_key}: the repeat guard saw {trigger.at_token} tokens, but there are "
                f"{len(self.tokens)}; this is a bug in the engine's adapter"
            )
        self.sampled.append(self.eos[0], 0.0, -1, mask=0)
        self.trigger = trigger
        self.end("repeat_terminated")

    def output(self) -> SequenceOutput:
        """The result of an ended sequence. Raises EngineError if it is still running."""
        if self.finish_reason is None:
            raise EngineError(f"{self.request.seq_key}: output requested before the sequence ended")
        text, raw_text = final_texts(self.tokenizer, self.tokens, self.request.sampling.stop)
        return SequenceOutput(
            seq_key=self.request.seq_key,
            prompt_token_ids=tuple(self.prompt),
            sampled=self.sampled,
            text=text,
            raw_text=raw_text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            trigger=self.trigger,
            first_token_at=self.first_token_at,
            prompt_ranked=self.prompt_ranked,
            cached_tokens=self.cached_tokens,
        )

    def _check(self, logprob: float | None, at: int) -> None:
        if logprob is not None and math.isnan(logprob):
            raise EngineError(f"{self.request.seq_key}: the model returned NaN at token {at}; check its weights")

    def _take(self, token: int, logprob: float | None, version: int, place: Place | None = None) -> None:
        self._check(logprob, len(self.tokens))
        if self.narrowed is not None:
            self.narrowed.take(token)
        self.sampled.append(token, logprob if self._scored else None, version, place=place)
        if token in self._ends:
            self.end("stop", self._ends[token])
        elif self._watch is not None and (found := self._watch.push(token)) is not None:
            self.end("stop", found)
        elif len(self.tokens) >= self._limit:
            self.end("length")

    def _replay(self) -> None:
        """Process the existing tokens; stops at an ending."""
        so_far = self.request.so_far
        if so_far is None:
            return
        places, logprobs = so_far.ranked or [None] * len(so_far), so_far.logprobs or [None] * len(so_far)
        for token, logprob, version, place in zip(so_far.token_ids, logprobs, so_far.versions, places, strict=True):
            self._take(token, logprob, version, place)
            if self.finish_reason is not None:
                return

    def _report(self) -> None:
        """Report the new tokens to the caller."""
        at, self._reported = self._reported, len(self.tokens)
        if self.request.report is None:
            return
        try:
            self.request.report(Progress.of(at, self.sampled[at:]))
        except Exception as error:  # the caller's error: it ends only this sequence
            raise EngineError(f"{self.request.seq_key}: its report failed: {error!r}") from error


def end_reasons(
    tokenizer: Any, eos_token_ids: Iterable[int], stop_token_ids: Iterable[int], stop: Iterable[str]
) -> dict[int, StopReason]:
    """Token id -> its stop reason: None for end of sequence, the id, or the stop string."""
    reasons: dict[int, StopReason] = {}
    for string in stop:
        token_ids = tokenizer.encode(string, add_special_tokens=False)
        if len(token_ids) == 1 and string in tokenizer.decode(token_ids):  # otherwise it is the unknown token
            reasons[token_ids[0]] = string
    reasons.update((token, token) for token in stop_token_ids)
    reasons.update((token, None) for token in eos_token_ids if token not in reasons)
    return reasons


def truncate(text: str, stop: Iterable[str]) -> str:
    """The text before its earliest stop string."""
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]


def final_texts(tokenizer: Any, token_ids: Sequence[int], stop: Iterable[str]) -> tuple[str, str]:
    """(text, raw_text): cleaned, cut at the earliest stop string, stripped; complete with special tokens."""
    text = truncate(tokenizer.decode(token_ids, skip_special_tokens=True), stop)
    return text.strip(), tokenizer.decode(token_ids, skip_special_tokens=False)


class StopStrings:
    """Finds the token that completes a stop string, at a constant cost per token.

    Only tokens since the last whole character are decoded again; of older text, just enough characters are kept to find
    a stop string that began there.
    """

    def __init__(self, stop: Sequence[str], decode: TextDecoder) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._keep = max(map(len, stop)) - 1
        self._tail = ""
        self._window: list[int] = []  # tokens already shown, then those not yet shown
        self._num_shown = 0
        self._shown = ""

    def push(self, token: int) -> str | None:
        """Take the next token; the stop string it completes (the earliest in the text), or None."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._num_shown
        if held == 1 and self._shown and text == self._shown:  # a special token: it is no left context
            self._window.pop()
            return None
        goes_on = text.endswith("\ufffd") and held < _MAX_HELD_TOKENS  # its last character continues in the next token
        recent = self._tail + (text.rstrip("\ufffd") if goes_on else text)[len(self._shown) :]
        old = len(self._tail)  # what ends there was found before
        found = [(at, one) for one in self._stop if (at := recent.find(one, max(0, old + 1 - len(one)))) >= 0]
        if found:
            return min(found)[1]
        if goes_on:
            return None
        # The shown tokens stay as left context: many tokenizers drop the space of a first token.
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        self._tail = recent[-self._keep :] if self._keep else ""
        return None
