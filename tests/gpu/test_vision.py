"""Vision models on vLLM's own implementations, which transformers' plain passes judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import run
from tests.contract.test_midflight_images import MESSAGES
from tests.contract.vlm_plain import PlainVlm
from tests.gpu.engines import SHARE, vllm_on_gpu
from tests.tiny_vlms import picture, save_tiny_llava, save_tiny_qwen_vl

TOLERANCE = 0.1  # nats: the patches are convolved in TF32, and the weights are wide
TOKENS = 16
# Sizes that need no resizing: with torchvision vLLM takes another resizing than plain transformers may.
MODELS = [pytest.param(save_tiny_llava, (32, 32), id="llava"), pytest.param(save_tiny_qwen_vl, (32, 24), id="qwen")]


@pytest.mark.parametrize(("save", "size"), MODELS)
def test_logprobs_are_those_of_a_plain_pass_over_the_same_picture(
    tmp_path: Path, save: Callable[..., Path], size: tuple[int, int]
) -> None:
    pytest.importorskip("torchvision", reason="vLLM's own vision models need torchvision")
    directory = save(tmp_path)
    model = ModelConfig(path=str(directory), dtype="float32")
    prompt = Prompts(model).vlm(MESSAGES)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS)
    pictures = [picture(*size, seed) for seed in range(3)]
    asked = [
        SequenceRequest(f"s{at}", tuple(prompt), sampling, at, (shown,), eos_token_ids=())
        for at, shown in enumerate(pictures)
    ]
    with vllm_on_gpu(model, gpu_memory_utilization=SHARE, enforce_eager=True) as backend:
        assert backend.facts.supports_vlm
        outputs = run(backend, *asked)
    plain = PlainVlm(directory)
    for image, output in zip(pictures, outputs, strict=True):
        expected = plain.logprobs(prompt, image, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=TOLERANCE, rtol=0)
    assert len({tuple(output.token_ids) for output in outputs}) == len(outputs), "the picture decides what is decoded"
