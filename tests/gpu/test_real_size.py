"""A random model of 0.6 B parameters on both engines, as a config starts them: bf16, memory, tokens per second, and a
version that lands while sequences run.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.workers.engine.contracts import Backend, EngineFacts, SequenceOutput, SequenceRequest
from tests.contract.engine_fixtures import run
from tests.contract.versions import random_prompt
from tests.gpu.engines import DEVICE, assert_off_by_rounding, free_memory, hf_on_gpu, vllm_on_gpu
from tests.tiny_models import build_tokenizer

SIZE: dict[str, Any] = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SEQUENCES, PROMPT, TOKENS = 64, 200, 128
TOKENS_AMID = 3 * TOKENS  # enough for a version to land while they are decoded
WAIT_S = 120.0
OUTSIDE_GIB = 2.0  # CUDA's context and captured graphs, which vLLM does not count into its share


@dataclass(frozen=True)
class Decoded:
    """What an engine gave; the engine itself is gone, and its memory free."""

    facts: EngineFacts
    outputs: list[SequenceOutput]
    amid: list[SequenceOutput]  # under version 0, then under version 1
    used_gib: float  # of the whole device, while it ran


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[int, Path]]:
    """Two versions. Over a gigabyte each: removed at once, as pytest would keep them for three runs."""
    root = tmp_path_factory.mktemp("real")
    yield {version: saved(root / f"v{version}", seed=version) for version in range(2)}
    shutil.rmtree(root)


def saved(path: Path, seed: int) -> Path:
    tokenizer: Any = build_tokenizer()
    config = Qwen3Config(
        **SIZE,
        **HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    del model
    free_memory()
    return path


@pytest.fixture(scope="module")
def by_vllm(directories: Mapping[int, Path]) -> Decoded:
    """Nothing set but the model's path: bf16, compilation, CUDA graphs, 0.9 of the memory."""
    with vllm_on_gpu(ModelConfig(path=str(directories[0])), max_batch=SEQUENCES) as backend:
        return decoded(backend, directories)


@pytest.fixture(scope="module")
def by_hf(directories: Mapping[int, Path]) -> Decoded:
    with hf_on_gpu(ModelConfig(path=str(directories[0])), max_batch=SEQUENCES) as backend:
        return decoded(backend, directories)


def decoded(backend: Backend, directories: Mapping[int, Path]) -> Decoded:
    """Twice, as the first time warms up; the second is timed. Then once more, amid which version 1 lands."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=TOKENS)
    requests = [
        SequenceRequest(f"s{seed}", tuple(random_prompt(seed, PROMPT)), sampling, seed, eos_token_ids=())
        for seed in range(SEQUENCES)
    ]
    run(backend, *requests)
    start = time.perf_counter()
    outputs = run(backend, *requests)
    seconds = time.perf_counter() - start
    free, total = torch.cuda.mem_get_info() if DEVICE == "cuda" else (0, 0)
    tokens = sum(len(output.token_ids) for output in outputs)
    used_gib = (total - free) / 2**30
    print(f"{backend.facts.name}: {tokens / seconds:.0f} tokens/s, {used_gib:.1f} GiB of the device in use")
    amid, load_s = asyncio.run(decoded_amid(backend, directories, requests))
    print(f"{backend.facts.name}: a version of 1.2 GB landed in {load_s:.2f} s")
    return Decoded(backend.facts, outputs, amid, used_gib)


async def decoded_amid(
    backend: Backend, directories: Mapping[int, Path], requests: list[SequenceRequest]
) -> tuple[list[SequenceOutput], float]:
    """(outputs, seconds from the load's beginning until the version is there): each sequence has tokens of both."""
    early = asyncio.Event()
    loop = asyncio.get_running_loop()

    def saw(so_far: Progress) -> None:
        """In the engine's thread: the engine waits here until the load is on its way."""
        if not early.is_set() and so_far.offset + len(so_far.token_ids) >= TOKENS // 8:
            loop.call_soon_threadsafe(early.set)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(WAIT_S)

    sampling = msgspec.structs.replace(requests[0].sampling, max_new_tokens=TOKENS_AMID)
    longer = [replace(one, sampling=sampling) for one in requests]
    leader = replace(longer[0], report_every=1, report=saw)
    async with asyncio.timeout(WAIT_S):
        running = asyncio.gather(*(backend.decode(one) for one in [leader, *longer[1:]]))
        await early.wait()
        start = time.perf_counter()
        await backend.load_weights(directories[1], 1)
        load_s = time.perf_counter() - start
        return list(await running), load_s


def test_vllm_starts_compiled_in_bf16_by_default(by_vllm: Decoded) -> None:
    assert (by_vllm.facts.device, by_vllm.facts.dtype) == (DEVICE, "bfloat16")
    assert "eager" not in by_vllm.facts.flags


def test_hf_is_bf16_on_the_gpu_by_default(by_hf: Decoded) -> None:
    assert by_hf.facts.device.startswith(DEVICE)
    assert by_hf.facts.dtype == "bfloat16"


def test_vllm_keeps_to_its_share_of_the_memory(by_vllm: Decoded) -> None:
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert by_vllm.used_gib <= VllmEngineOptions().gpu_memory_utilization * total_gib + OUTSIDE_GIB


@pytest.mark.parametrize("engine", ["by_vllm", "by_hf"])
def test_every_token_is_there_and_its_logprob_off_by_rounding_alone(
    request: pytest.FixtureRequest, directories: Mapping[int, Path], engine: str
) -> None:
    found: Decoded = request.getfixturevalue(engine)
    assert {output.finish_reason for output in found.outputs} == {"length"}
    assert {len(output.token_ids) for output in found.outputs} == {TOKENS}
    assert_off_by_rounding(found.outputs, {0: directories[0]})


@pytest.mark.parametrize("engine", ["by_vllm", "by_hf"])
def test_a_version_that_lands_mid_flight_decodes_from_its_token_on(
    request: pytest.FixtureRequest, directories: Mapping[int, Path], engine: str
) -> None:
    found: Decoded = request.getfixturevalue(engine)
    assert {len(output.token_ids) for output in found.amid} == {TOKENS_AMID}
    assert_off_by_rounding(found.amid, directories)
