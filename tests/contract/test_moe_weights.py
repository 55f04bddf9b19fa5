"""A mixture of experts on both engines: versions as the trainer writes them, loaded, refused, restored."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.bench.truth.architectures import save
from sluice.consumers.training.model import load_policy, probe_score, write_model
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import WeightsError
from sluice.workers.engine.contracts import Backend, WeightsProbe
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.backend import Engine
from sluice.workers.engine.vllm.checkpoint import Checkpoint
from tests.contract.engine_fixtures import reference, reference_logprobs, request, run, started
from tests.contract.vllm_fixtures import started_vllm

PROMPT = list(b"the abc of experts")
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("Qwen3-MoE", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def policy(source: Path) -> Any:
    return load_policy(source, ModelConfig(path=str(source), device="cpu"))


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, source: Path) -> Iterator[Backend]:
    with (started if request.param == "hf" else started_vllm)(source) as backend:
        yield backend


def published(policy: Any, source: Path, target: Path, seed: int) -> tuple[Path, WeightsProbe]:
    """A version after a small step, as the trainer publishes it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    target.mkdir()
    write_model(policy, source, target)
    return target, WeightsProbe(tuple(PROMPT), probe_score(policy, PROMPT), tolerance=1e-2)


def assert_serves(engine: Backend, directory: Path) -> None:
    output = run(engine, request(PROMPT))[0]
    expected = reference_logprobs(reference(directory), PROMPT, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_a_version_is_in_the_hubs_layout(policy: Any, source: Path, tmp_path: Path) -> None:
    directory, _ = published(policy, source, tmp_path / "v", seed=0)
    names = load_file(directory / "model.safetensors").keys()
    assert names == load_file(source / "model.safetensors").keys()
    assert EXPERT in names


def test_updates_are_served_and_scored(engine: Backend, policy: Any, source: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        directory, probe = published(policy, source, tmp_path / f"v{number}", seed=number)
        asyncio.run(engine.load_weights(directory, engine.version + 1, probe))
        assert_serves(engine, directory)
    asyncio.run(engine.load_weights(source, 0))
    assert_serves(engine, source)


@pytest.mark.parametrize("kind", ["missing", "shape", "fused"])
def test_a_version_of_another_layout_is_refused_untouched(
    engine: Backend, policy: Any, source: Path, tmp_path: Path, kind: str
) -> None:
    directory, _ = published(policy, source, tmp_path / "v", seed=3)
    tensors = load_file(directory / "model.safetensors")
    if kind == "missing":
        del tensors[EXPERT]
    elif kind == "shape":
        tensors[EXPERT] = tensors[EXPERT][:-1].contiguous()
    else:
        tensors = {name: value.contiguous().clone() for name, value in policy.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    before, version = run(engine, request(PROMPT))[0], engine.version
    if kind == "fused" and engine.facts.name == "hf":
        asyncio.run(engine.load_weights(directory, version))  # transformers reads its own names as well
        asyncio.run(engine.load_weights(source, version))
    else:
        with pytest.raises(WeightsError, match="experts"):
            asyncio.run(engine.load_weights(directory, version + 1))
    assert (run(engine, request(PROMPT))[0], engine.version) == (before, version)


def test_a_version_that_scores_wrongly_is_taken_back(
    engine: Backend, policy: Any, source: Path, tmp_path: Path
) -> None:
    directory, probe = published(policy, source, tmp_path / "v", seed=4)
    wrong = WeightsProbe(probe.token_ids, probe.score + 3, probe.tolerance)
    before = run(engine, request(PROMPT))[0]
    with pytest.raises(WeightsError, match="restored"):
        asyncio.run(engine.load_weights(directory, engine.version + 1, wrong))
    assert run(engine, request(PROMPT))[0] == before
    asyncio.run(engine.load_weights(directory, engine.version + 1, probe))
    assert_serves(engine, directory)
    asyncio.run(engine.load_weights(source, 0))


def test_names_are_known_where_vllm_was_started_from_bin_files(source: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(source, start)
    torch.save(load_file(start / "model.safetensors"), start / "pytorch_model.bin")
    (start / "model.safetensors").unlink()
    names = Checkpoint(ModelConfig(path=str(start))).names_for(source)
    assert names == {name: name for name in load_file(source / "model.safetensors")}


@pytest.mark.vllm
def test_a_layer_that_vllm_does_not_fill_is_an_error_that_names_it(
    engine: Backend, policy: Any, source: Path, tmp_path: Path
) -> None:
    """Its own reload would only log it, and a small update that came in part scores almost like the whole."""
    if not isinstance(engine, VllmBackend):
        pytest.skip("of vLLM's loading alone")
    directory, _ = published(policy, source, tmp_path / "v", seed=5)
    names = Checkpoint(ModelConfig(path=str(source))).names_for(directory)
    del names[EXPERT]

    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def load_in_part(inner: Engine) -> None:
        assert inner._engine is not None
        async with inner.sequences.paused():
            llm, update = inner._engine.llm, {"directory": str(directory), "names": names}
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update))

    with pytest.raises(Exception, match=r"vLLM took \d+ of \d+ elements of model\.layers\.0\.mlp\.experts"):
        asyncio.run(engine._do(load_in_part))
    asyncio.run(engine.load_weights(source, 0))
    assert_serves(engine, source)
