"""Both engines on CUDA, and what their numbers are compared with."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.workers.engine.contracts import SequenceOutput
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.vllm import VllmBackend

DEVICE = "cuda"
FP32 = 1e-3  # nats: fp32 on CUDA against fp32 on the CPU, wide weights
TF32 = 2e-2  # nats: vLLM's attention kernels for fp32 may multiply with TF32's 10 bits
SHARE = 0.3  # of the GPU's memory, for tiny models beside a plain one


@contextlib.contextmanager
def hf_on_gpu(model: ModelConfig, **options: Any) -> Iterator[HfBackend]:
    """A started hf backend; its memory is free again afterwards."""
    backend = HfBackend(model, **options)
    asyncio.run(backend.start())
    try:
        yield backend
    finally:
        asyncio.run(backend.close())
        del backend
        free_memory()


@contextlib.contextmanager
def vllm_on_gpu(model: ModelConfig, *, max_batch: int = 6, **options: Any) -> Iterator[VllmBackend]:
    """A started vLLM backend of the GPU build; compilation stays on unless `options` say otherwise."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vllm is not installed; run `make test-gpu VLLM=gpu`")
    backend = VllmBackend(model, max_batch=max_batch, options=VllmEngineOptions(**options))
    free_memory()
    asyncio.run(backend.start())
    try:
        yield backend
    finally:
        asyncio.run(backend.close())


def free_memory() -> None:
    """Give back what torch keeps in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def teacher_forced(directory: Path, dtype: torch.dtype, outputs: Sequence[SequenceOutput]) -> torch.Tensor:
    """Logprobs of all tokens of all outputs, one after the other, by one plain pass each; fp32, on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.eval().to(DEVICE)
    logprobs: list[torch.Tensor] = []
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.token_ids
        ids = torch.tensor([[*prompt, *tokens]], device=DEVICE)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        logprobs.append(torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu())
    del model
    free_memory()
    return torch.cat(logprobs)


def assert_off_by_rounding(outputs: Sequence[SequenceOutput], directories: Mapping[int, Path]) -> None:
    """Decoded in bf16: as near to a plain bf16 pass under each token's version as rounding lets two bf16 passes be.

    What rounding makes of these models is measured: a plain bf16 pass against a plain fp32 one.
    """
    decoded = torch.tensor([value for output in outputs for value in output.logprobs])
    versions = torch.tensor([version for output in outputs for version in output.versions])
    assert set(versions.tolist()) == set(directories), "tokens of every version"
    for version, directory in directories.items():
        half = teacher_forced(directory, torch.bfloat16, outputs)
        noise = (half - teacher_forced(directory, torch.float32, outputs)).abs()
        error = (decoded - half).abs()[versions == version]
        print(
            f"version {version}, bf16: decoded - plain {error.mean():.2e} nats, at most {error.max():.2e}; "
            f"plain - fp32 {noise.mean():.2e}, at most {noise.max():.2e}"
        )
        assert error.mean() <= 2 * noise.mean() + 1e-3
        assert error.max() <= 4 * noise.max() + 1e-2
