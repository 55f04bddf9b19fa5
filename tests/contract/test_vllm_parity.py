"""The same tiny model through real vLLM and through the hf backend: equal tokens, equal raw logprobs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import ragged_prompts, request, run

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised greedy": {"repetition_penalty": 1.3},
    "seeded": {"temperature": 1.0},
    "all of it": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
}


def assert_equal(ours: list[SequenceOutput], theirs: list[SequenceOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert (one.text, one.raw_text) == (other.text, other.raw_text)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_and_logprobs_equal_those_of_the_hf_backend(
    hf: HfBackend, vllm: VllmBackend, sampling: dict[str, Any]
) -> None:
    requests = [request(prompt, i, **sampling) for i, prompt in enumerate(ragged_prompts(9, longest=60, seed=5))]
    assert_equal(run(vllm, *requests), run(hf, *requests))


def test_greedy_and_sampled_rows_that_come_and_go_keep_their_own_numbers(hf: HfBackend, vllm: VllmBackend) -> None:
    """More sequences than rows, of different lengths: rows are removed, refilled and moved."""
    requests = [
        request(
            prompt,
            i,
            temperature=0.5 * (i % 3),
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.8)[i % 4 // 2],
            max_new_tokens=5 + 13 * i % 70,
        )
        for i, prompt in enumerate(ragged_prompts(24, longest=90, seed=3))
    ]
    assert_equal(run(vllm, *requests), run(hf, *requests))


def test_a_prefill_in_pieces_draws_each_number_once(hf: HfBackend, vllm: VllmBackend) -> None:
    """48 tokens a step; prompts that begin alike share the prefix cache as well."""
    prompt = [7, 9] * 60
    requests = [request([*prompt, i], i, temperature=1.0, max_new_tokens=30) for i in range(6)]
    assert_equal(run(vllm, *requests), run(hf, *requests))


def test_either_backend_goes_on_where_the_other_was_interrupted(hf: HfBackend, vllm: VllmBackend) -> None:
    asked = request([5, 6, 7], 3, temperature=1.0, top_p=0.95, repetition_penalty=1.1, max_new_tokens=50)
    whole = run(hf, asked)
    assert_equal(run(vllm, _cut(asked, whole[0])), whole)
    assert_equal(run(hf, _cut(asked, run(vllm, asked)[0])), whole)


def test_the_score_of_a_sequence_is_that_of_the_hf_backend(hf: HfBackend, vllm: VllmBackend) -> None:
    token_ids = ragged_prompts(1, longest=100, seed=8)[0]
    ours, theirs = (asyncio.run(backend.score(token_ids)) for backend in (vllm, hf))
    assert ours == pytest.approx(theirs, abs=1e-2)


def test_both_know_the_same_of_the_model(hf: HfBackend, vllm: VllmBackend) -> None:
    def known(backend: HfBackend | VllmBackend) -> tuple[Any, ...]:
        facts = backend.facts
        return facts.vocab_size, facts.eos_token_ids, facts.context_length, facts.dtype, facts.device, facts.model

    assert known(vllm) == known(hf)
    assert vllm.facts.name == "vllm"


def _cut(asked: SequenceRequest, output: SequenceOutput) -> SequenceRequest:
    return replace(asked, so_far=output.sampled[:20])
