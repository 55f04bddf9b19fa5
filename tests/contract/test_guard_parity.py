"""The guard ends the same sequences at the same token on both backends, and touches no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from sluice.workers.engine.backends import RoutedBackend
from sluice.workers.engine.contracts import Backend, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import ragged_prompts, request
from tests.contract.guard_fixtures import decoded, ending, guarded_ending, guarded_engine
from tests.loop_models import LoopModel

LIMIT = 64
HOT = 3.8  # the best logit is 30 above the others: at this temperature one token in eleven leaves its chain


def _requests(loops: LoopModel) -> list[SequenceRequest]:
    """From every token of the vocabulary, in turn greedy and sampled as the model is; and some that wander."""
    tokens = range(1, len(loops.successor))
    plain = [request([t], t, temperature=float(t % 2), max_new_tokens=LIMIT) for t in tokens]
    hot = [request([t], t, temperature=HOT, max_new_tokens=LIMIT) for t in loops.looping]
    return [replace(one, seq_key=f"s{at}") for at, one in enumerate([*plain, *hot])]


@pytest.mark.vllm
def test_both_backends_end_the_same_sequences_at_the_same_token(
    loops: LoopModel, guarded_hf: RoutedBackend, guarded_vllm: RoutedBackend, unguarded: HfBackend
) -> None:
    requests = _requests(loops)
    whole = [output.token_ids for output in decoded(unguarded, *requests)]
    for asked, tokens in zip(requests, whole, strict=True):
        if asked.sampling.temperature < HOT:
            assert tokens == _known(loops, asked.prompt_token_ids[-1])
    wanted = [guarded_ending(tokens) for tokens in whole]
    hf = [ending(output) for output in decoded(guarded_hf, *requests)]
    assert hf == wanted
    assert [ending(output) for output in decoded(guarded_vllm, *requests)] == hf
    counted = Counter(trigger.rule if trigger else "none" for _, trigger in wanted)
    assert set(counted) == {"object_keys", "consecutive", "ngram", "none"}
    assert sum(counted.values()) >= 300
    ends = zip(requests, wanted, strict=True)
    strayed = [tokens for asked, (tokens, trigger) in ends if trigger and tokens[:-1] != _start(loops, asked, tokens)]
    assert len(strayed) >= 5, "some left their chain and were ended in another loop"


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_healthy_sequences_beside_a_loop_are_those_of_a_run_without_the_guard(
    kind: Literal["hf", "vllm"], model_dir: Path, request: pytest.FixtureRequest
) -> None:
    off: Backend = request.getfixturevalue(kind)
    healthy = _healthy()
    loop = replace(healthy[0], seq_key="loop", allowed_token_ids=(0,))  # id 0 is a token as any other
    before = decoded(off, loop, *healthy)
    with guarded_engine(model_dir, kind, max_batch=6) as engine:
        ended, *after = decoded(engine, loop, *healthy)
    assert ending(ended) == guarded_ending([0] * 40, engine.facts.eos_token_ids[0])
    assert engine.facts.eos_token_ids[0] != 0
    for left, right in zip(before[1:], after, strict=True):
        assert (right.trigger, right.token_ids) == (None, left.token_ids)
        assert right.logprobs == pytest.approx(left.logprobs, abs=1e-4)


def _healthy() -> list[SequenceRequest]:
    return [
        replace(request(prompt, at, temperature=1.0, max_new_tokens=40), seq_key=f"h{at}")
        for at, prompt in enumerate(ragged_prompts(5, seed=5))
    ]


def _start(loops: LoopModel, asked: SequenceRequest, tokens: list[int]) -> list[int]:
    return loops.continuation(asked.prompt_token_ids[-1], len(tokens) - 1)


def _known(loops: LoopModel, token: int) -> list[int]:
    """As `successor` says, to the first of the two ids that end a sequence of this model."""
    tokens = loops.continuation(token, LIMIT)
    ends = [at for at, token in enumerate(tokens, 1) if token in (0, 262)]
    return tokens[: ends[0]] if ends else tokens
