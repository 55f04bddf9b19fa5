"""One sequence -> what vLLM is asked for."""

from __future__ import annotations

from typing import Any

from workers.generation.backends.vllm.names import EXTRA
from workers.generation.running import RunningSequence
from workers.guard.arguments import GuardArguments

_DELTA_TOKENS = 16
"""Tokens that vLLM may hold back; bounds how late a deadline, a report and `progress` see them."""


def vllm_sampling(sequence: RunningSequence, guard: GuardArguments | None = None, *, scores: bool = False) -> Any:
    """`vllm.SamplingParams` for what is left of the sequence.

    Ends by ids and length are found by vLLM as well, so that it stops in the same step; all else is found by us.
    The repeat guard's reserved id is one of those. With `scores` the logprobs of the whole prompt come as well.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request, done = sequence.request, len(sequence.tokens)
    sampling = request.sampling
    sampled = sampling.temperature > 0
    extra = {
        "seed": request.seed % 2**64,
        "offset": done,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    interval = 1 if sequence.watches_text else _DELTA_TOKENS
    if request.report_every:
        interval = min(interval, request.report_every)
    return SamplingParams(
        temperature=1.0 if sampled else 0.0,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_new_tokens - done,
        stop_token_ids=[*sequence.end_token_ids, *([guard.forced] if guard else [])],
        allowed_token_ids=list(request.allowed_token_ids) or None,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if scores else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
        extra_args={**({EXTRA: extra} if sampled else {}), **(guard.plain() if guard else {})} or None,
        skip_clone=True,
    )


def vllm_scoring() -> Any:
    """`vllm.SamplingParams` for the logprobs of a prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
