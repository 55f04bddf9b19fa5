"""A run whose versions are adapters, on a real broker: trainer, worker and scorer agree, and kills change nothing."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.audit.recompute import open_version
from sluice.consumers.export.model import export_model
from sluice.consumers.training import lora
from sluice.consumers.training.model import probe_score
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, LoraConfig, WeightsConfig
from sluice.pipeline.errors import DataError, WeightsError
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import digest_of
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.hf import HfBackend
from sluice.workers.scorer.model import VersionedModel
from sluice.workers.weights_watch import WeightsWatch
from tests.contract.engine_fixtures import reference
from tests.cut_off import cut_off_at
from tests.integration.test_published_versions import KILLS
from tests.integration.test_trainer import hand_on, trained
from tests.roles import role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import train_step

ADAPTERS = LoraConfig(rank=4, target_modules=("q_proj", "down_proj", "lm_head"))
CLOSE = 1e-3  # nats, over the whole probe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, **trainer: Any) -> Config:
    """Nothing is retired, so that every version can be read."""
    return run_config(
        broker,
        keys,
        run_dir,
        producer={"samples_per_version": 2, "max_in_flight": 64},
        trainer={"batch_wait_s": 0.3, "lora": ADAPTERS, **trainer},
        model={"path": str(source), "device": "cpu"},
        weights=WeightsConfig(retention=99),
    )


async def train(config: Config) -> None:
    source = Path(config.model.path)
    async with role_of(config, "trainer", "trainer") as role:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        step = train_step(source, learning_rate=3e-2, lora=config.trainer.lora)
        try:
            await Trainer(role, owner, step, source).run()
        finally:
            await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


async def newest(client: Any, keys: Keys) -> WeightVersion:
    registry = WeightsRegistry(client, keys)
    manifest = await registry.get(await registry.latest() or 0)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("room", [None, AdapterRoom(1, ADAPTERS.rank)], ids=["merged", "requests"])
async def test_every_role_gets_the_trainers_numbers(
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    tmp_path: Path,
    room: AdapterRoom | None,
) -> None:
    config = config_of(broker_config, keys, run_dir, source)
    await hand_on(client, keys, 0, 3)
    await train(config)
    manifest = await newest(client, keys)
    probe, wanted = list(manifest.probe_token_ids), manifest.probe_score
    assert (manifest.version, manifest.base) == (3, digest_of(source))
    assert wanted is not None
    assert abs(wanted - probe_score(reference(source), probe)) > 0.1
    backend = HfBackend(config.model, room=room)
    await backend.start()  # a late joiner, under the base
    try:
        async with role_of(config) as role:
            watch = WeightsWatch(role, backend)
            await watch.look()
            assert watch.newer() == 3
            assert await watch.pull(3)
        assert await backend.score(probe) == pytest.approx(wanted, abs=CLOSE)
    finally:
        await backend.close()
    scorer = await asyncio.to_thread(VersionedModel, config)
    for version in (2, 3, 0, 1):  # any order: none depends on the one before
        loaded = await WeightsRegistry(client, keys).get(version)
        assert loaded is not None
        await asyncio.to_thread(scorer.load, loaded)
        assert scorer.version == version
    directory = Path(config.run_dir) / config.run
    audited = open_version(directory / "weights", 3, config.model)
    assert lora.has_adapter(audited)
    assert probe_score(audited, probe) == pytest.approx(wanted, abs=CLOSE)
    out = tmp_path / "exported"
    assert export_model(directory, out, config.model) == 3
    assert probe_score(reference(out), probe) == pytest.approx(wanted, abs=CLOSE)
    assert (out / "tokenizer.json").is_file()
    with pytest.raises(DataError, match="no version 9 on disk; it has 0, 1, 2, 3"):
        export_model(directory, tmp_path / "none", config.model, 9)


async def test_a_worker_of_another_base_refuses_every_version_by_name(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source)
    await hand_on(client, keys, 0, 1)
    await train(config)
    manifest = await newest(client, keys)
    elsewhere = config_of(broker_config, keys, run_dir, save_tiny_model(tmp_path, seed=5))
    scorer = await asyncio.to_thread(VersionedModel, elsewhere)
    with pytest.raises(WeightsError, match=f"version 1 is an adapter of the weights {manifest.base[:12]}"):
        await asyncio.to_thread(scorer.load, manifest)


@pytest.mark.parametrize("seed", range(2))
async def test_a_run_with_kills_ends_with_the_adapter_of_one_without(
    seed: int,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(seed)
    every = {"publish_every": draw.randint(1, 2), "checkpoint_every": draw.randint(2, 3)}
    config = config_of(broker_config, keys, run_dir, source, **every)
    await hand_on(client, keys, 0, 6)
    for _ in range(3):
        try:
            await cut_off_at(draw.choice(KILLS), draw.randint(1, 4), monkeypatch, train(config))
        except pytest.fail.Exception:
            break  # it ended before it came to that call
    await train(config)
    assert trained(config) == Counter(f"{number}-{member}:0" for number in range(6) for member in range(2))
    unkilled = Keys(f"unkilled-{uuid.uuid4().hex}")
    straight = config_of(broker_config, unkilled, run_dir / "unkilled", source, **every)
    await hand_on(client, unkilled, 0, 6)
    await train(straight)
    assert (await newest(client, keys)).digest == (await newest(client, unkilled)).digest
