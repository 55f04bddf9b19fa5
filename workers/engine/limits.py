"""What one engine can decode whole; checked before any work.

Length rule: prompt + max_new_tokens must fit the context. A prompt is cut only if the request allows it
(`truncate_prompt`), always from the left, and the result says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import EngineFacts, SequenceRequest

_PLAIN = SamplingParams()


def fit_prompt(
    where: str, prompt: Sequence[int], sampling: SamplingParams, facts: EngineFacts
) -> tuple[list[int], int]:
    """(prompt, number of tokens cut from its left); cuts only with `truncate_prompt`.

    Raises RequestError when `max_new_tokens` leaves no room for a prompt.
    """
    if not sampling.truncate_prompt:
        return list(prompt), 0
    room = facts.context_length - sampling.max_new_tokens
    if room < 1:
        raise RequestError(
            f"{where}: max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in the context of "
            f"{facts.context_length}; use at most {facts.context_length - 1}"
        )
    cut = max(0, len(prompt) - room)
    return list(prompt[cut:]), cut


def check_request(request: SequenceRequest, facts: EngineFacts, prompt: Sequence[int]) -> None:
    """Raise RequestError unless the engine can decode the request whole; `prompt` is what the model will see."""
    key, limit, wanted = request.seq_key, facts.context_length, request.sampling.max_new_tokens
    if len(prompt) >= limit and request.images:
        raise RequestError(
            f"{key}: the prompt has {len(prompt)} tokens ({len(request.prompt_token_ids)} before its "
            f"{len(request.images)} images were expanded), the context is {limit}; send fewer or smaller images, or "
            "lower model.preprocess.max_pixels if the model has it (a prompt with images is never cut)"
        )
    if len(prompt) >= limit:
        raise RequestError(
            f"{key}: the prompt has {len(prompt)} tokens, the context is {limit}; shorten it, or set truncate_prompt"
        )
    room = limit - len(prompt)
    if wanted > room:
        raise RequestError(
            f"{key}: max_new_tokens {wanted} does not fit the context of {limit} "
            f"after a prompt of {len(prompt)} tokens; use at most {room} (sampling.max_new_tokens)"
        )
    check_token_ids(key, prompt, facts.vocab_size)
    check_token_ids(f"{key}: stop_token_ids", request.sampling.stop_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: eos_token_ids", request.eos_token_ids or (), facts.vocab_size)
    check_token_ids(
        f"{key}: pad_token_id", () if request.pad_token_id is None else (request.pad_token_id,), facts.vocab_size
    )
    check_token_ids(f"{key}: allowed_token_ids", request.allowed_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: allowed_token_ids", request.sampling.allowed_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: logit_bias", list(request.sampling.logit_bias), facts.vocab_size)
    if facts.repeat_terminate and request.eos_token_ids is not None and not request.eos_token_ids:
        raise RequestError(
            f"{key}: ignore_eos cannot be combined with repeat_terminate, which ends loops with an end-of-sequence id; "
            "leave eos_token_ids out, or switch the guard off"
        )
    sampling = request.sampling
    if facts.logprobs_mode != "raw_logprobs" and (
        sampling.top_p < 1 or sampling.top_k or sampling.min_p or sampling.reshapes(_PLAIN)
    ):
        raise RequestError(
            f"{key}: {facts.logprobs_mode} supports a temperature, but no top_p, top_k, min_p, penalty or constraint: "
            "under other weights a token they exclude has no logprob; remove them, or use raw logprobs"
        )
    if "" in request.sampling.stop:
        raise RequestError(f"{key}: an empty stop string would end every sequence immediately; remove it")
    if request.so_far is not None:
        if sampling.logprobs and len(request.so_far) and not request.so_far.logprobs:
            raise RequestError(f"{key}: its tokens so far have no logprobs, which are asked for; start anew")
        check_token_ids(f"{key}: so_far", request.so_far.token_ids, facts.vocab_size)


def check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside 0 .. vocab_size - 1."""
    if not token_ids:
        return
    if (odd := next((token for token in token_ids if not isinstance(token, int)), None)) is not None:
        raise RequestError(f"{where}: a token id is a whole number, not {odd!r}")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"{where}: token id {bad} is outside the model's vocabulary 0..{vocab_size - 1}")
