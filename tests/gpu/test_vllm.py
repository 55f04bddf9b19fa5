"""vLLM's GPU build with compilation on, in fp32: the hf backend's tokens, and weights that change mid-flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import ModelConfig
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import ragged_prompts, reference_logprobs, run
from tests.contract.near_ties import assert_same_unless_near_tie
from tests.contract.versions import Versions, assert_right, decode_amid, random_prompt
from tests.gpu.engines import DEVICE, SHARE, TF32, hf_on_gpu, vllm_on_gpu
from tests.gpu.test_hf import TOKENS, endless

LONG = 200  # 40 were decoded on an H200 before the first load came


@pytest.fixture(scope="module")
def vllm(model_dir: Path) -> Iterator[VllmBackend]:
    """Short steps, so that prefills come in pieces."""
    model = ModelConfig(path=str(model_dir), dtype="float32")
    extra = {"max_num_batched_tokens": 48}
    with vllm_on_gpu(model, gpu_memory_utilization=SHARE, extra=extra) as backend:
        yield backend


@pytest.fixture(scope="module")
def hf(model_dir: Path) -> Iterator[HfBackend]:
    with hf_on_gpu(ModelConfig(path=str(model_dir), dtype="float32", device=DEVICE), max_batch=6) as backend:
        yield backend


def test_it_starts_compiled_and_on_the_gpu(vllm: VllmBackend) -> None:
    assert vllm.facts.device == DEVICE
    assert vllm.facts.dtype == "float32"
    assert "eager" not in vllm.facts.flags


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_the_hf_backend_and_logprobs_those_of_a_plain_pass(
    vllm: VllmBackend, hf: HfBackend, plain: Any, temperature: float
) -> None:
    requests = [endless(prompt, seed, temperature) for seed, prompt in enumerate(ragged_prompts(9, seed=5))]
    equal = 0
    for asked, one, other in zip(requests, run(vllm, *requests), run(hf, *requests), strict=True):
        equal += assert_same_unless_near_tie(plain, asked, one.token_ids, other.token_ids, margin=TF32)
        expected = reference_logprobs(plain, asked.prompt_token_ids, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=TF32, rtol=0)
    assert equal >= TOKENS * len(requests) // 4


def test_weights_change_mid_flight(vllm: VllmBackend, versions: Versions) -> None:
    """Every logprob and every proximal logprob is that of a plain pass under its version."""
    requests = [endless(random_prompt(seed), seed, tokens=LONG) for seed in range(9)]
    outputs = decode_amid(vllm, versions, [(3, 1), (9, 2)], requests)
    assert set(outputs[0].versions) == {0, 1, 2}
    for output in outputs:
        assert_right(output, versions, tolerance=TF32)
