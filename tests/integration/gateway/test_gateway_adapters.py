"""Adapters by name: from the gateway's `model` over the queue to a worker that loaded them, on a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from sluice.consumers.training import lora
from sluice.consumers.training.model import write_model
from sluice.pipeline.config.types import BrokerConfig, Config, LoraConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from sluice.workers.weights_watch import load_adapters, room_of
from tests.contract.engine_fixtures import reference, reference_logprobs, started
from tests.integration.gateway.harness import USER, serving
from tests.roles import run_config
from tests.tiny_models import save_tiny_model

CLOSE = 1e-4  # nats
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}


def adapter(base: Path, target: Path, seed: int) -> Any:
    """Write one; returns the model with it."""
    model = reference(base)
    torch.manual_seed(seed)
    lora.add(model, LoraConfig(rank=seed, alpha=6.0), text_only=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    target.mkdir()
    write_model(model, base, target)
    return model.eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, source: Path) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: (root / name, adapter(source, root / name, rank)) for rank, name in ((3, "poetry"), (5, "prose"))}


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, adapters: dict[str, str]) -> Config:
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 10.0}
    worker |= {"lora": "requests", "adapters": adapters}
    model = {"path": str(source), "device": "cpu"}
    return run_config(broker, keys, run_dir, worker=worker, model=model, trainer={"external": True})


@pytest.fixture
def config(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, adapters: dict[str, tuple[Path, Any]]
) -> Config:
    return config_of(broker_config, keys, run_dir, source, {name: str(its[0]) for name, its in adapters.items()})


@pytest.fixture
def backend(config: Config, source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4, room=room_of(config)) as running:
        asyncio.run(load_adapters(config, running))
        yield running


@pytest.fixture
def bare(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


async def test_a_caller_chooses_an_adapter_by_its_name(
    config: Config, backend: HfBackend, source: Path, adapters: dict[str, tuple[Path, Any]]
) -> None:
    models = {"default": reference(source), **{name: model for name, (_, model) in adapters.items()}}
    async with serving(config, backend) as gateway:
        listed = [one.id for one in (await gateway.openai.models.list()).data]
        assert listed == ["default", "policy", "poetry", "prose"]
        assert (await gateway.openai.models.retrieve("poetry")).id == "poetry"
        asked = ["poetry", "default", "prose", "poetry"]
        answers = await asyncio.gather(*(gateway.chat([USER], model=name, logprobs=True, **SHORT) for name in asked))
        for name, answer in zip(asked, answers, strict=True):
            assert answer["model"] == name
            wanted = reference_logprobs(models[name], answer["prompt_token_ids"], answer["token_ids"])
            assert answer["logprobs"] == pytest.approx(wanted.tolist(), abs=CLOSE)
        prompt = answers[0]["prompt_token_ids"]
        body = {"model": "prose", "token_ids": prompt, "sampling_params": {"max_tokens": 6, "temperature": 0.0}}
        status, generated = await gateway.post("/inference/v1/generate", body)
        assert (status, generated["choices"][0]["token_ids"]) == (200, answers[2]["token_ids"][:6])
        completed = await gateway.openai.completions.create(model="poetry", prompt=prompt, max_tokens=6, temperature=0)
        assert completed.model == "poetry"


async def test_a_wrong_name_and_a_rollout_are_refused(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        with pytest.raises(openai.NotFoundError, match="did you mean 'poetry'"):
            await gateway.openai.chat.completions.create(model="poetri", messages=[USER])  # type: ignore[list-item]
        talk: dict[str, Any] = {"messages": [USER], "max_tokens": 4}
        asked = {"/v1/chat/completions": talk, "/v1/messages": talk, "/v1/completions": {"prompt": "a"}}
        for path, prompt in asked.items():
            status, body = await gateway.post(path, {"model": "poetry", "rollout_id": "r", **prompt})
            assert status == 400
            assert "a rollout's tokens train the policy" in body["error"]["message"]
        assert (await gateway.finish("r"))[0] == 404, "what is refused opens no rollout"


async def test_a_worker_that_lacks_the_adapter_says_so(config: Config, bare: HfBackend) -> None:
    async with serving(config, bare) as gateway:
        status, body = await gateway.post("/v1/chat/completions", {"messages": [USER], "model": "poetry", **SHORT})
    assert status == 400
    assert "no adapter 'poetry': this worker serves none" in body["error"]["message"]


def test_a_worker_does_not_start_with_an_adapter_that_it_cannot_serve(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, tmp_path: Path
) -> None:
    def served(directory: Path) -> Config:
        return config_of(broker_config, keys, run_dir, source, {"poetry": str(directory)})

    with pytest.raises(ModelError, match=r"worker.adapters: .*no adapter_config.json"):
        room_of(served(source))
    adapter(save_tiny_model(tmp_path / "other", seed=7), tmp_path / "foreign", 2)
    foreign = served(tmp_path / "foreign")
    adapter(source, tmp_path / "odd", 2)
    (tmp_path / "odd" / "manifest.json").write_text(json.dumps({"version": 1, "path": "", "digest": "0" * 64}))
    odd = served(tmp_path / "odd")
    with started(source, room=room_of(odd)) as backend:
        with pytest.raises(ModelError, match=r"worker.adapters.poetry: .*an adapter of the weights"):
            asyncio.run(load_adapters(foreign, backend))
        with pytest.raises(ModelError, match=r"worker.adapters.poetry: "):
            asyncio.run(load_adapters(odd, backend))
        assert backend.versions == {"": 0}
