"""A trainer whose newest checkpoint was deleted, or whose broker lost its last seconds, goes on under new numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.training import checkpoint
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.keys import Keys
from tests.integration.test_trainer import config_of, hand_on, train
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def flip(file: Path, at: int) -> None:
    """One bit."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


async def assert_newest(client: Any, keys: Keys, version: int) -> None:
    registry = WeightsRegistry(client, keys)
    assert await registry.latest() == version
    manifest = await registry.get(version)
    assert manifest is not None
    assert verify(manifest)


async def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 3)
    await train(config, source)
    await assert_newest(client, keys, 3)
    newest = checkpoint.newest(run_dir / keys.run / "checkpoints")
    assert newest is not None
    flip(newest / "model.safetensors", -1)
    await hand_on(client, keys, 3, 1)
    await train(config, source)
    await assert_newest(client, keys, 4)
    assert (newest.parent / f"damaged-{newest.name}").is_dir()


async def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 1)
    await train(config, source)
    for directory in (run_dir / keys.run / "checkpoints").iterdir():
        flip(directory / "trainer" / "state.json", 3)
    with pytest.raises(ExceptionGroup) as caught:
        await train(config, source)
    why = "no intact checkpoint is left .*state.json differs from what was saved"
    assert caught.group_contains(ModelError, match=why)
    await assert_newest(client, keys, 1)


async def test_versions_that_the_broker_lost_are_published_again_or_passed_over(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 3)
    await train(config, source)
    for lost in (3, 2):
        await client.hdel(keys.versions, str(lost), f"{lost}:digest")
    await client.set(keys.latest, "1")
    await hand_on(client, keys, 3, 1)
    await train(config, source)
    await assert_newest(client, keys, 4)
    assert await client.hget(keys.versions, "3:digest"), "the one that its checkpoint holds was published again"
