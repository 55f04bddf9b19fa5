"""What is decoded beside a sequence changes its logits by rounding only, and its tokens not at all."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.workers.engine.contracts import Backend
from tests.contract.engine_fixtures import ragged_prompts, request, run
from tests.contract.near_ties import assert_same_unless_near_tie

ROUNDING = 1e-4  # nats; measured here: 6e-6 on hf, 3e-6 on vllm, and 0.5 and more if a prompt has another token


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_neighbours_change_no_token_beyond_a_near_tie(backend: Backend, plain: Any, temperature: float) -> None:
    wanted = [
        request(prompt, seed, temperature=temperature, max_new_tokens=40 + 7 * seed)
        for seed, prompt in enumerate(ragged_prompts(5, seed=21))
    ]
    crowd = [
        request(prompt, 100 + seed, temperature=1.2, max_new_tokens=3 + 5 * seed)
        for seed, prompt in enumerate(ragged_prompts(14, longest=100, seed=22))
    ]
    mixed = run(backend, *crowd[:4], *wanted, *crowd[4:])[4 : 4 + len(wanted)]
    for asked, output in zip(wanted, mixed, strict=True):
        alone = run(backend, asked)[0]
        same = assert_same_unless_near_tie(plain, asked, alone.token_ids, output.token_ids)
        assert same >= 10
        assert output.logprobs[:same] == pytest.approx(alone.logprobs[:same], abs=ROUNDING)
