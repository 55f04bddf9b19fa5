"""Ranks, alternatives and the prompt's logprobs over both backends, against plain passes of transformers."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.sampled_tokens import Place, Ranked
from sluice.workers.engine.contracts import Backend, SequenceOutput
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.sequences import positions
from tests.contract.engine_fixtures import ragged_prompts, request, run
from tests.deadlines import HANG_S

PROMPT = list(b"the abc of it")
SHAPED: dict[str, Any] = {"temperature": 0.9, "presence_penalty": 1.5, "logit_bias": {70: 3.0}}


def expected(plain: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Raw logprobs (positions, vocab) of all tokens after the first."""
    with torch.inference_mode():
        return torch.log_softmax(plain(torch.tensor([[*prompt, *tokens]])).logits[0, :-1].float(), -1)


def check(places: list[Place], tokens: list[int], logprobs: torch.Tensor, count: int) -> None:
    for place, token, row in zip(places, tokens, logprobs, strict=True):
        assert (
            place.rank == int((row >= row[token] - 1e-4).sum())
            or place.rank == int((row > row[token] + 1e-4).sum()) + 1
        )
        assert len(place.token_ids) == len(place.logprobs) == count
        best = row.topk(count).values if count else row[:0]
        torch.testing.assert_close(torch.tensor(place.logprobs), best, atol=1e-4, rtol=0)
        torch.testing.assert_close(row[list(place.token_ids)], best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, SHAPED], ids=["greedy", "sampled", "shaped"])
def test_places_are_those_of_the_raw_distribution(
    backend: Backend, plain: Any, sampling: dict[str, Any], count: int
) -> None:
    prompts = ragged_prompts(4, longest=30, seed=2)
    asked = [request(one, i, **sampling, top_logprobs=count) for i, one in enumerate(prompts)]
    free = run(backend, *(request(one, i, **sampling) for i, one in enumerate(prompts)))
    for prompt, one, other in zip(prompts, run(backend, *asked), free, strict=True):
        assert (one.token_ids, other.sampled.ranked) == (other.token_ids, []), "asking changes nothing"
        logprobs = expected(plain, prompt, one.token_ids)[len(prompt) - 1 :]
        check(one.sampled.ranked, one.token_ids, logprobs, count)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, SHAPED], ids=["greedy", "sampled", "shaped"])
def test_who_asks_for_no_logprobs_gets_the_same_tokens(backend: Backend, sampling: dict[str, Any]) -> None:
    prompts = ragged_prompts(6, longest=30, seed=3)
    asked = [request(one, i, **sampling) for i, one in enumerate(prompts)]
    bare = [request(one, i, **sampling, logprobs=False) for i, one in enumerate(prompts)]
    wanted = run(backend, *asked)
    mixed = [bare[i] if i % 2 else asked[i] for i in range(len(prompts))]
    for found in (run(backend, *bare), run(backend, *mixed)):
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert [one.versions for one in found] == [one.versions for one in wanted]
    assert all(one.logprobs == [] for one in run(backend, *bare))
    assert [len(one.logprobs) for one in run(backend, *mixed)] == [
        0 if i % 2 else len(one.token_ids) for i, one in enumerate(wanted)
    ]
    [rest] = run(backend, replace(bare[0], so_far=wanted[0].sampled[:9]))
    assert (rest.token_ids, rest.logprobs) == (wanted[0].token_ids, [])
    with pytest.raises(RequestError, match="tokens so far have no logprobs"):
        run(backend, replace(asked[0], so_far=rest.sampled[:9]))


@pytest.mark.parametrize("count", [0, 3])
def test_the_prompts_logprobs(backend: Backend, plain: Any, count: int) -> None:
    prompts = [*ragged_prompts(3, longest=100, seed=9), [7]]
    found = run(backend, *(request(one, max_new_tokens=3, prompt_logprobs=count) for one in prompts))
    for prompt, one in zip(prompts, found, strict=True):
        ranked = one.prompt_ranked
        assert ranked is not None
        rows = expected(plain, prompt, [])
        chosen = rows.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(list(ranked.logprobs)), chosen, atol=1e-4, rtol=0)
        check(ranked.places(), prompt[1:], rows, count)


def test_an_interrupted_sequence_has_the_places_of_its_earlier_tokens(hf: HfBackend, vllm: VllmBackend) -> None:
    asked = request(PROMPT, 3, temperature=1.0, top_logprobs=2, prompt_logprobs=0, max_new_tokens=30)
    [whole] = run(hf, asked)
    for backend in (hf, vllm):
        [rest] = run(backend, replace(asked, so_far=whole.sampled[:12]))
        assert rest.token_ids == whole.token_ids
        assert [one.rank for one in rest.sampled.ranked] == [one.rank for one in whole.sampled.ranked]
        assert rest.prompt_ranked is not None


async def test_reports_have_the_places(backend: Backend) -> None:
    pieces: list[Any] = []
    asked = replace(request(PROMPT, top_logprobs=1, max_new_tokens=20), report_every=4, report=pieces.append)
    output: SequenceOutput = await asyncio.wait_for(backend.decode(asked), HANG_S)
    told = [place for piece in pieces for place in piece.sampled.ranked]
    assert len(told) >= 12
    assert [one.rank for one in told] == [one.rank for one in output.sampled.ranked[: len(told)]]


async def test_tokens_that_waited_for_us_have_all_their_places(backend: Backend) -> None:
    """vLLM merges outputs that nobody took yet, and its merged logprobs name a token once."""
    asked = request(PROMPT, 5, temperature=1.0, top_logprobs=2, max_new_tokens=24)
    [alone] = await asyncio.gather(backend.decode(asked))
    late = replace(asked, report_every=2, report=lambda _: time.sleep(0.01))
    [one] = await asyncio.gather(backend.decode(late))
    assert one.token_ids == alone.token_ids
    assert [place.token_ids for place in one.sampled.ranked] == [place.token_ids for place in alone.sampled.ranked]
    assert [place.rank for place in one.sampled.ranked] == [place.rank for place in alone.sampled.ranked]


def test_merged_logprobs_of_vllm_are_read_as_the_others() -> None:
    from vllm.logprobs import FlatLogprobs

    plain, merged = FlatLogprobs(), FlatLogprobs()
    rows = [([7, 7, 8, 9], 1), ([8, 7, 8, 9], 3), ([5, 7, 8, 9], 6)]  # the second is a tie of two
    for ids, rank in rows:
        logprobs = {7: -0.5, 8: -1.0, 9: -1.0, 5: -4.0}
        ranks = itertools.chain((rank,), (1, 2, 3))
        plain.append_fast(ids, [logprobs[one] for one in ids], ranks, itertools.repeat(None))
    merged.extend(plain)
    assert merged.token_ids == [7, 8, 9, 8, 7, 9, 5, 7, 8, 9], "vLLM's own way to merge"
    assert positions(merged, 3) == positions(plain, 3)
    assert [place.rank for _, place in positions(merged, 3)] == [1, 3, 6]


def test_places_travel() -> None:
    places = [Place(1, (5, 6), (-0.5, -1.0)), Place(3, (6, 5), (-0.25, -2.0))]
    assert Ranked.of(places).places() == places
    assert Ranked.of([Place(2), Place(1)]).places() == [Place(2), Place(1)]
    assert Ranked.of([]).places() == []
