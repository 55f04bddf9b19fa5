"""Weight loads into a running vLLM engine: what it serves afterwards is what transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.pipeline.errors import WeightsError
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import reference, reference_logprobs, request, run
from tests.contract.vllm_fixtures import started_vllm
from tests.tiny_models import quantised_copy, save_tiny_model

PROMPT = list(b"the abc of it")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    with started_vllm(save_tiny_model(tmp_path_factory.mktemp("tied"), seed=1, tied=True)) as backend:
        yield backend


def assert_serves(backend: VllmBackend, directory: Path) -> None:
    output = run(backend, request(PROMPT))[0]
    expected = reference_logprobs(reference(directory), PROMPT, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
    ids = [*PROMPT, *output.token_ids]
    score = reference_logprobs(reference(directory), ids[:1], ids[1:]).sum().item()
    assert asyncio.run(backend.score(ids)) == pytest.approx(score, abs=1e-3)
    assert set(output.versions) == {backend.version}


def test_a_model_with_a_head_of_its_own_is_replaced_whole(vllm: VllmBackend, model_dir: Path, tmp_path: Path) -> None:
    new = save_tiny_model(tmp_path, seed=2)
    before = run(vllm, request(PROMPT))[0]
    asyncio.run(vllm.load_weights(new, 1))
    assert_serves(vllm, new)
    assert run(vllm, request(PROMPT))[0].token_ids != before.token_ids, (
        "the prefix cache is not that of the old weights"
    )
    asyncio.run(vllm.load_weights(model_dir, 0))
    assert run(vllm, request(PROMPT))[0] == before


@pytest.mark.parametrize("kind", ["the embedding", "the head", "both"])
def test_a_tied_head_follows_the_embedding(tied: VllmBackend, tmp_path: Path, kind: str) -> None:
    new = save_tiny_model(tmp_path, seed=len(kind), tied=True)
    tensors = load_file(new / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    names = {
        "the embedding": ["model.embed_tokens"],
        "the head": ["lm_head"],
        "both": ["model.embed_tokens", "lm_head"],
    }
    tensors |= {f"{name}.weight": embedding.clone() for name in names[kind]}
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    asyncio.run(tied.load_weights(new, tied.version + 1))
    assert_serves(tied, new)


@pytest.mark.parametrize("kind", ["missing", "shape", "tied"])
def test_a_refused_load_keeps_the_old_version_serving(tied: VllmBackend, tmp_path: Path, kind: str) -> None:
    new = save_tiny_model(tmp_path, seed=9, tied=True)
    tensors = load_file(new / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    before, version = run(tied, request(PROMPT))[0], tied.version
    with pytest.raises(WeightsError, match="are tied" if kind == "tied" else "up_proj"):
        asyncio.run(tied.load_weights(new, 99))
    assert tied.version == version
    assert run(tied, request(PROMPT))[0] == before


def test_a_quantised_engine_serves_on_and_refuses_plain_versions_by_name(tmp_path: Path) -> None:
    version = save_tiny_model(tmp_path / "version", seed=1)
    with started_vllm(quantised_copy(version, tmp_path / "start"), dtype="bfloat16") as backend:
        before = run(backend, request(PROMPT))[0]
        with pytest.raises(WeightsError, match=r"quantised \(compressed-tensors\)"):
            asyncio.run(backend.load_weights(version, 1))
        assert backend.version == 0
        assert run(backend, request(PROMPT))[0] == before
