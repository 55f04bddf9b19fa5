"""The hf backend on CUDA: fp32 against transformers, bf16 by rounding, weights that change mid-flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Grammar, SamplingParams
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.constraints import UNMASKED, Constraint, Grammars, Narrowed
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import ragged_prompts, reference, reference_logprobs, run
from tests.contract.near_ties import assert_same_unless_near_tie
from tests.contract.versions import Versions, assert_right, decode_amid, random_prompt
from tests.gpu.engines import DEVICE, FP32, assert_off_by_rounding, hf_on_gpu
from tests.tiny_models import build_tokenizer

TOKENS = 40


def endless(prompt: list[int], seed: int = 0, temperature: float = 1.0, tokens: int = TOKENS) -> SequenceRequest:
    """Ended by its length alone."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=tokens)
    return SequenceRequest(f"s{seed}", tuple(prompt), sampling, seed, eos_token_ids=())


@pytest.fixture(scope="module")
def hf(model_dir: Path) -> Iterator[HfBackend]:
    with hf_on_gpu(ModelConfig(path=str(model_dir), dtype="float32", device=DEVICE), max_batch=6) as backend:
        yield backend


def test_it_is_on_the_gpu(hf: HfBackend) -> None:
    assert hf.facts.device.startswith(DEVICE)
    assert hf.facts.dtype == "float32"


def test_a_token_that_its_constraint_excludes_is_refused_where_the_logits_lie() -> None:
    tokenizer: Any = build_tokenizer()
    a, other, end = tokenizer.convert_tokens_to_ids(["a", "c", "<|im_end|>"])
    constraint = Constraint(allowed=(a, other, end), grammar=Grammar(kind="regex", text="a+"), ends=(end,))
    one, logits = Narrowed(constraint, Grammars(lambda: tokenizer, len(tokenizer))), torch.zeros(len(tokenizer))
    assert one.narrow(logits.to(DEVICE))
    with pytest.raises(RequestError, match=UNMASKED):
        one.take(other)


def test_greedy_tokens_are_those_of_generate_on_the_same_device(hf: HfBackend, model_dir: Path, plain: Any) -> None:
    """A ragged batch with more sequences than rows, against one `generate` each."""
    model = reference(model_dir).to(DEVICE)
    equal = 0
    requests = [endless(prompt, seed, temperature=0.0) for seed, prompt in enumerate(ragged_prompts(9, seed=5))]
    outputs = run(hf, *requests)
    for asked, output in zip(requests, outputs, strict=True):
        ids = torch.tensor([asked.prompt_token_ids], device=DEVICE)
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1
        )
        tokens = whole[0, ids.shape[1] :].tolist()
        theirs = replace(output, sampled=SampledTokens(tokens, [0.0] * TOKENS, [0] * TOKENS))
        equal += assert_same_unless_near_tie(plain, asked, output.token_ids, theirs.token_ids)
    assert equal >= TOKENS * len(requests) // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_plain_pass_on_the_cpu(hf: HfBackend, plain: Any, temperature: float) -> None:
    requests = [endless(prompt, seed, temperature) for seed, prompt in enumerate(ragged_prompts(9, seed=6))]
    for asked, output in zip(requests, run(hf, *requests), strict=True):
        expected = reference_logprobs(plain, asked.prompt_token_ids, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=FP32, rtol=0)


def test_weights_change_mid_flight(hf: HfBackend, versions: Versions) -> None:
    """Every logprob and every proximal logprob is that of a plain pass under its version."""
    requests = [endless(random_prompt(seed), seed) for seed in range(9)]
    outputs = decode_amid(hf, versions, [(3, 1), (9, 2)], requests)
    assert set(outputs[0].versions) == {0, 1, 2}
    for output in outputs:
        assert_right(output, versions, tolerance=FP32)


def test_bf16_logprobs_are_off_by_rounding_alone(model_dir: Path) -> None:
    requests = [endless(prompt, seed) for seed, prompt in enumerate(ragged_prompts(9, seed=7))]
    with hf_on_gpu(ModelConfig(path=str(model_dir), dtype="bfloat16", device=DEVICE), max_batch=6) as backend:
        outputs = run(backend, *requests)
    assert_off_by_rounding(outputs, {0: model_dir})
