"""What the hf engine keeps of sequences that ended, for those that go on from them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.bench.truth.architectures import save
from sluice.bench.truth.check import plain_logprobs
from sluice.pipeline.config.types import ModelConfig
from sluice.workers.engine.adapters import Policy
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.hf.cache import BLOCK, PrefixCache
from sluice.workers.engine.hf.model import load_model
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import (
    decode_all,
    ragged_prompts,
    reference,
    reference_logprobs,
    request,
    run,
    started,
)
from tests.contract.versions import Updates, Versions
from tests.tiny_models import save_tiny_model

PROMPT = list(b"what the first turn of a conversation begins with")


def turn(prompt: list[int], seed: int = 0, **sampling: object) -> SequenceRequest:
    """A turn that another one may follow."""
    return replace(request(prompt, seed, **sampling), goes_on=True)


def cached(output: SequenceOutput) -> int:
    return output.cached_tokens


def follow(output: SequenceOutput, added: bytes = b" and what a tool said") -> list[int]:
    """The next turn's prompt."""
    return [*output.prompt_token_ids, *output.token_ids, *added]


def check(directory: Path, *outputs: SequenceOutput) -> None:
    """Each token has the logprob that one plain pass over the whole sequence gives."""
    model = reference(directory)
    for output in outputs:
        expected = reference_logprobs(model, list(output.prompt_token_ids), output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def conversation(backend: HfBackend, turns: int = 3, *, seed: int = 0) -> list[SequenceOutput]:
    outputs = run(backend, turn(PROMPT, seed))
    for _ in range(turns - 1):
        outputs += run(backend, turn(follow(outputs[-1]), seed))
    return outputs


def test_a_turn_is_prefilled_from_where_the_last_one_ended(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=3)
    with started(directory, prefix_cache_mb=8) as backend:
        outputs = conversation(backend)
        fresh = run(backend, replace(turn(follow(outputs[1])), goes_on=False))[0]
    with started(directory) as backend:
        assert run(backend, request(follow(outputs[1])))[0].token_ids == outputs[2].token_ids == fresh.token_ids
    # The newest sampled token was never fed to the model; all before it are kept.
    assert [cached(output) for output in outputs] == [0, *(len(follow(one, b"")) - 1 for one in outputs[:2])]
    check(directory, *outputs)


HARD = ("Qwen2 (window)", "Llama4", "Gemma3", "GPT-OSS", "DeepSeek-V3", "Qwen2.5-VL", "Gemma3 (multimodal)")
"""Windows, chunks, sinks, latent and many-part positions: where a turn's tokens see more than the tokens before."""


@pytest.mark.parametrize("name", [*HARD, "Falcon-H1", "LFM2"])
def test_every_kind_of_attention_goes_on_and_a_state_is_computed_anew(tmp_path: Path, name: str) -> None:
    directory = save(name, tmp_path / "model")
    config = ModelConfig(path=str(directory), device="cpu", variant="text")

    async def decode() -> list[SequenceOutput]:
        backend = HfBackend(config, prefix_cache_mb=8)
        await backend.start()
        try:
            first = await decode_all(backend, [turn(PROMPT[at:]) for at in (0, 9)])
            asked = zip((1, 7), first, strict=True)
            return await decode_all(backend, [turn(follow(one, bytes(b"more" * at))) for at, one in asked])
        finally:
            await backend.close()

    second = asyncio.run(decode())
    assert all(cached(one) > 0 for one in second) == (name in HARD)
    model = load_model(config).module
    for output in second:
        expected = plain_logprobs(model, [*output.prompt_token_ids, *output.token_ids])
        found = torch.tensor(output.logprobs)
        torch.testing.assert_close(found, expected[len(output.prompt_token_ids) - 1 :], atol=1e-4, rtol=0)


def test_turns_of_many_conversations_share_a_batch(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=4)
    prompts = [prompt for prompt in ragged_prompts(24, longest=150, seed=5) if len(prompt) > BLOCK]
    with started(directory, prefix_cache_mb=8, max_batch=16) as backend:
        first = run(backend, *(turn(prompt, at, temperature=1.0) for at, prompt in enumerate(prompts)))
        lengths = [3 + 17 * (at % 5) for at in range(len(first))]  # added tokens
        asked = [follow(one, bytes(b"x" * length)) for one, length in zip(first, lengths, strict=True)]
        fresh = [list(range(40 + at)) for at in range(4)]
        second = run(backend, *(turn(prompt, at, temperature=1.0) for at, prompt in enumerate([*asked, *fresh])))
    check(directory, *first, *second)
    known = [len(one.prompt_token_ids) + len(one.token_ids) - 1 for one in first]
    found = [cached(one) for one in second]
    assert all(0 < mine <= most for mine, most in zip(found, known, strict=False))
    assert found[len(first) :] == [0] * 4
    assert sum(found) >= 0.8 * sum(known)  # a row whose pass is a bit longer than it needs


def test_branches_of_one_history_both_begin_with_it(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=3)
    with started(directory, prefix_cache_mb=8) as backend:
        outputs = conversation(backend, 2)
        one, two = (run(backend, turn(follow(outputs[0], added)))[0] for added in (b" left or", b" right, so"))
    shared = len(follow(outputs[0], b" "))  # the turn that replaced the first one has a space there as well
    assert (cached(one), cached(two)) == (shared, shared)
    check(directory, one, two)


def test_nothing_of_older_weights_is_used(tmp_path: Path) -> None:
    old = save_tiny_model(tmp_path / "old", seed=1)
    new = save_tiny_model(tmp_path / "new", seed=2)
    for copy_gb in (0.0, None):  # loaded in place, and beside
        with started(old, prefix_cache_mb=8, second_copy_gb=copy_gb) as backend:
            before = run(backend, turn(PROMPT))[0]
            asyncio.run(backend.load_weights(new, 1))
            after = run(backend, turn(follow(before)))[0]
            again = run(backend, turn(follow(after)))[0]
        assert (cached(after), set(after.versions)) == (0, {1})
        assert cached(again) == len(follow(after, b"")) - 1
        check(new, after, again)


def test_a_row_that_runs_over_a_swap_is_kept_under_the_new_weights(tmp_path: Path) -> None:
    old = save_tiny_model(tmp_path / "old", seed=1)
    new = save_tiny_model(tmp_path / "new", seed=2)

    async def decode(backend: HfBackend) -> list[SequenceOutput]:
        asked = replace(turn(PROMPT, max_new_tokens=150), eos_token_ids=())
        [first] = await Updates(backend, Versions({1: new}, {}), [(4, 1)]).decode([asked])
        return [first, await backend.decode(turn(follow(first)))]

    with started(old, prefix_cache_mb=8) as backend:
        first, second = asyncio.run(decode(backend))
    assert first.versions[-1] == 1
    assert cached(second) == len(follow(first, b"")) - 1
    check(new, second)


@pytest.mark.vllm
def test_vllm_says_what_its_own_cache_had_and_forgets_it_with_the_weights(
    vllm: VllmBackend, model_dir: Path, tmp_path: Path
) -> None:
    new = save_tiny_model(tmp_path, seed=2)
    prompt = [(7 * at) % 200 for at in range(160)]  # more than one of its blocks, which have up to 128 tokens
    before = run(vllm, turn(prompt))[0]
    again = run(vllm, turn(follow(before)))[0]
    assert 0 < cached(again) <= len(follow(before, b""))
    asyncio.run(vllm.load_weights(new, 1))
    after = run(vllm, turn(follow(before)))[0]
    assert (cached(after), set(after.versions)) == (0, {1})
    asyncio.run(vllm.load_weights(model_dir, 0))


def test_without_a_bound_or_a_wish_nothing_is_kept(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=3)
    with started(directory) as backend:
        assert [cached(output) for output in conversation(backend)] == [0, 0, 0]
    with started(directory, prefix_cache_mb=8) as backend:
        first = run(backend, request(PROMPT))[0]
        second = run(backend, turn(follow(first)))[0]
        assert cached(second) == 0
        assert cached(run(backend, request(follow(second)))[0]) == 0  # no turn: bit by bit as on a fresh engine


def test_the_bound_holds_and_the_least_recently_used_goes() -> None:
    policy, other = Policy(1), Policy(1)
    layers = [(torch.zeros(2, 64, 8), torch.zeros(2, 64, 8))]  # 8 KiB
    cache = PrefixCache(3 * 8192)
    prompts = [[at, *range(100, 163)] for at in range(4)]
    for prompt in prompts[:3]:
        cache.keep(prompt, layers, policy)
    assert cache.longest([*prompts[0], 7], policy) is not None  # used: now the newest
    cache.keep(prompts[3], layers, policy)
    found = [cache.longest(prompt, policy) for prompt in prompts]
    assert [one is not None for one in found] == [True, False, True, True]
    assert (len(cache), cache.num_bytes) == (3, 3 * 8192)
    assert cache.longest(prompts[0], other) is None
    cache.keep([9, *range(200)], [(torch.zeros(2, 400, 8), torch.zeros(2, 400, 8))], policy)  # larger than all of it
    assert len(cache) == 3
    cache.forget(other)
    assert len(cache) == 3
    cache.forget(policy)
    assert (len(cache), cache.num_bytes, cache._blocks) == (0, 0, {})


def test_equal_hashes_are_no_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.workers.engine.hf.cache._hashes", lambda ids: iter([1] * (len(ids) // BLOCK)))
    cache, policy = PrefixCache(1 << 20), Policy(1)
    cache.keep(list(range(32)), [(torch.zeros(1, 32, 2), torch.zeros(1, 32, 2))], policy)
    assert cache.longest(list(range(1, 40)), policy) is None
    found = cache.longest([*range(20), 0], policy)
    assert found is not None
    assert found[1] == 20
