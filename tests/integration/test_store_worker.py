"""A worker and where its versions come from: a store that is away for a while, and memory that it lets go of."""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import s3fs

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, ModelConfig, WeightsConfig
from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights import object_store
from sluice.pipeline.weights.carriers import carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers import weights_watch
from sluice.workers.engine.hf import HfBackend
from sluice.workers.scorer.model import VersionedModel
from sluice.workers.weights_watch import WeightsWatch
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.object_stores import BUCKET, s3_server, use
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model


async def test_a_version_is_asked_for_again_after_the_store_was_away(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_model(tmp_path / "model")
    weights = WeightsConfig(
        transport="store", store_url=f"s3://{BUCKET}/away", store_timeout_s=HANG_S, cache_dir=str(tmp_path / "cache")
    )
    model = {"path": str(source), "device": "cpu"}
    config = run_config(broker_config, keys, run_dir, model=model, weights=weights)
    with s3_server() as address:
        port = urlsplit(address).port or 0
        use(monkeypatch, address)
        s3fs.S3FileSystem(skip_instance_cache=True).makedirs(BUCKET, exist_ok=True)
        other = save_tiny_model(tmp_path / "other", seed=1)
        full = carrier_of(config).publish(other, WeightVersion(version=1, path="", digest=""), lambda: None)
    owner, registry = Ownership(client, keys, "trainer"), WeightsRegistry(client, keys)
    assert await owner.try_acquire()
    await registry.register(full, owner.key, owner.nonce)
    engine = HfBackend(ModelConfig(path=str(source), device="cpu"), max_batch=2)
    await engine.start()
    try:
        async with role_of(config) as role:
            watch = WeightsWatch(role, engine)
            await watch.look()
            with monkeypatch.context() as patch:
                patch.setattr(object_store, "_PAUSES_S", (2 * HANG_S,))  # the first failure is the last
                assert not await watch.pull(1)
                assert (engine.version, watch.newer()) == (0, None)
                patch.setattr(weights_watch, "_AGAIN", 0)
                assert not await watch.pull(1)

            async def wanted() -> bool:
                return watch.newer() == 1

            await eventually(wanted, "the refused version to be wanted again")
            with s3_server(port):
                assert await watch.pull(1)
            assert engine.version == 1
    finally:
        await engine.close()


async def test_a_worker_that_ends_has_no_version_in_memory(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, tmp_path: Path
) -> None:
    """A process may serve many runs one after the other, each with a worker of its own."""
    source, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", seed=1)
    model, weights = {"path": str(source), "device": "cpu"}, WeightsConfig(transport="engine")
    config = run_config(broker_config, keys, run_dir, model=model, weights=weights)
    trainer = carrier_of(config)
    with contextlib.closing(trainer):
        full = trainer.publish(other, WeightVersion(version=1, path="", digest=""), lambda: None)
        owner, registry = Ownership(client, keys, "trainer"), WeightsRegistry(client, keys)
        assert await owner.try_acquire()
        await registry.register(full, owner.key, owner.nonce)
        engine = HfBackend(ModelConfig(path=str(source), device="cpu"), max_batch=2)
        await engine.start()
        try:
            async with working(config, engine):

                async def loaded() -> bool:
                    return engine.version == 1 and len(in_memory(config.run)) == 2

                await eventually(loaded, "the worker to link the version and load it")
            assert len(in_memory(config.run)) == 1, "the trainer's own"
        finally:
            await engine.close()
    assert not in_memory(config.run)


async def test_refused_versions_take_no_room(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, tmp_path: Path
) -> None:
    source, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", seed=1)
    model, weights = {"path": str(source), "device": "cpu"}, WeightsConfig(transport="engine")
    config = run_config(broker_config, keys, run_dir, model=model, weights=weights)
    owner, registry = Ownership(client, keys, "trainer"), WeightsRegistry(client, keys)
    assert await owner.try_acquire()
    scorer = VersionedModel(config)
    with contextlib.closing(carrier_of(config)) as trainer:
        engine = HfBackend(ModelConfig(path=str(source), device="cpu"), max_batch=2)
        await engine.start()
        try:
            async with role_of(config) as role:
                watch = WeightsWatch(role, engine)
                for version, is_right in enumerate([False, True, False, False], start=1):
                    wrong = {} if is_right else {"probe_token_ids": TokenArray([7, 8, 9]), "probe_score": 9.0}
                    made = WeightVersion(version=version, path="", digest="", **wrong)
                    full = trainer.publish(other if is_right else source, made, lambda: None)
                    await registry.register(full, owner.key, owner.nonce)
                    with contextlib.nullcontext() if is_right else pytest.raises(WeightsError, match="score"):
                        scorer.load(full)
                    assert await watch.pull(version) is is_right
                    theirs = [] if version == 1 else ["v000002", "v000002"]
                    shown = [f"v{number:06d}" for number in (version - 1, version) if number]
                    assert [name.partition("-")[0] for name in in_memory(config.run)] == sorted(theirs + shown)
                watch.close()
        finally:
            await engine.close()


def in_memory(run: str) -> list[str]:
    """Processes' copies of versions."""
    return sorted(path.name for path in MEMORY.glob(f"sluice-{glob.escape(run)}-*/v*"))
