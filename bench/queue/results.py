"""Results of a given size, as workers make them: tokens, a logprob each, text."""

from __future__ import annotations

from functools import cache

import msgspec

from sluice.pipeline.wire.messages import SamplingParams, SequenceResult, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_PROMPT = 64
_WORD = "word "  # text of one token


def result_of(job_id: str, size: int) -> SequenceResult:
    """The only sequence of a job; encoded it takes about `size` bytes."""
    return msgspec.structs.replace(_template(size), seq_id=f"{job_id}:0", group_id=job_id)


@cache
def _template(size: int) -> SequenceResult:
    none, thousand = len(encode(_with_tokens(0))), len(encode(_with_tokens(1000)))
    return _with_tokens(max(0, round((size - none) * 1000 / (thousand - none))))


def _with_tokens(count: int) -> SequenceResult:
    text = _WORD * count
    return SequenceResult(
        seq_id="commit:" + "0" * 24 + ":0",
        group_id="commit:" + "0" * 24,
        group_size=1,
        index=0,
        worker="worker-0",
        backend="hf",
        prompt_token_ids=TokenArray(range(_PROMPT)),
        token_ids=TokenArray(range(count)),
        logprobs=FloatArray([-0.5] * count),
        versions=Runs.of([1] * count),
        text=text,
        raw_text=text,
        finish_reason="stop",
        sampling=SamplingParams(),
        task="exact_answer",
    )
