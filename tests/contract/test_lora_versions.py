"""Versions that are adapters, over both engines: every number against peft's own, unmerged model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from sluice.consumers.training import lora
from sluice.consumers.training.model import probe_score, write_model
from sluice.pipeline.config.types import LoraConfig
from sluice.pipeline.errors import WeightsError
from sluice.workers.engine.contracts import Backend, WeightsProbe
from tests.contract.engine_fixtures import reference
from tests.contract.test_midflight import endless
from tests.contract.versions import Versions, assert_right, decode_amid, own_weights_again, random_prompt

__all__ = ["own_weights_again"]
PROMPT = list(b"the abc of it")


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Versions:
    """Version 0 is the base; 1 and 2 have adapters in all linear layers, 3 in the head and two others."""
    root = tmp_path_factory.mktemp("adapters")
    directories, models = {0: model_dir}, {0: reference(model_dir)}
    for version in (1, 2, 3):
        model, directory = reference(model_dir), root / f"v{version}"
        modules = ("lm_head", "k_proj", "up_proj") if version == 3 else "all-linear"
        torch.manual_seed(version)
        lora.add(model, LoraConfig(rank=3, alpha=6.0, target_modules=modules), text_only=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.3)
        directory.mkdir()
        write_model(model, model_dir, directory)
        directories[version], models[version] = directory, model.eval()
    return Versions(directories, models)


def test_running_sequences_switch_between_two_tokens(backend: Backend, versions: Versions) -> None:
    schedule = [(4, 1), (12, 2), (20, 3)]
    requests = [endless(PROMPT, 200), *(endless(random_prompt(seed), 40, seed) for seed in range(1, 6))]
    outputs = decode_amid(backend, versions, schedule, requests)
    assert set(outputs[0].versions) == {0, 1, 2, 3}
    for output in outputs:
        assert_right(output, versions)


def test_an_adapter_of_other_numbers_is_undone_to_the_adapter_before(backend: Backend, versions: Versions) -> None:
    def probe(version: int, off: float = 0.0) -> WeightsProbe:
        return WeightsProbe(tuple(PROMPT), probe_score(versions.models[version], PROMPT) + off, tolerance=1e-3)

    asyncio.run(backend.load_weights(versions.directories[1], 1, probe(1)))
    with pytest.raises(WeightsError, match="v1 were restored"):
        asyncio.run(backend.load_weights(versions.directories[2], 2, probe(2, off=1.0)))
    assert asyncio.run(backend.score(PROMPT)) == pytest.approx(probe_score(versions.models[1], PROMPT), abs=1e-3)
    asyncio.run(backend.load_weights(versions.directories[3], 3, probe(3)))
    asyncio.run(backend.load_weights(versions.directories[0], 0, probe(0)))


def test_an_adapter_that_does_not_fit_touches_nothing(backend: Backend, versions: Versions, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((versions.directories[1] / name).read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    before = asyncio.run(backend.score(PROMPT))
    with pytest.raises(WeightsError, match="use_dora True: only plain LoRA"):
        asyncio.run(backend.load_weights(tmp_path, 4))
    assert asyncio.run(backend.score(PROMPT)) == before
