"""Versions without a checkpoint: a kill undoes them, and nothing else: each sample once, one line of live versions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.training import checkpoint
from sluice.consumers.training.session import Session
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import numbered_directories, read_manifest, verify
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from tests.cut_off import cut_off_at
from tests.integration.test_trainer import assert_each_once, config_of, hand_on, train
from tests.tiny_models import save_tiny_model

_SESSION, _VERSIONS = "sluice.consumers.training.session.Session", "sluice.pipeline.weights.versions"
KILLS = [
    "sluice.consumers.training.checkpoint.save",
    "sluice.consumers.training.checkpoint.prune",
    "sluice.consumers.training.step_log.StepRecords.write",
    "sluice.consumers.training.step_log.StepRecords.show",
    f"{_SESSION}._free_credit",
    f"{_SESSION}._number_for",
    f"{_SESSION}._write_version",
    f"{_SESSION}._ack",
    f"{_SESSION}._register",
    "sluice.pipeline.weights.registry.WeightsRegistry.register",
    f"{_VERSIONS}.retire",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def manifests(config: Config) -> dict[int, WeightVersion]:
    root = Path(config.run_dir) / config.run / "weights"
    return {number: read_manifest(directory) for number, directory in numbered_directories(root)}


def _keeping_all(config: Config) -> Config:
    """Nothing is retired, so that the whole line can be read."""
    return replace(config, weights=replace(config.weights, retention=99))


async def live(client: Any, keys: Keys, config: Config) -> list[WeightVersion]:
    """From the newest version back to the first, by their parents."""
    found, newest = manifests(config), await WeightsRegistry(client, keys).latest()
    assert newest is not None
    line = [found[newest]]
    while line[-1].parent != -1:
        assert line[-1].parent is not None
        line.append(found[line[-1].parent])
    return line


@pytest.mark.parametrize("seed", range(6))
async def test_a_run_with_kills_ends_with_the_weights_of_one_without(
    seed: int,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redone step has the same batches in the same order, so here the same weights: they keep their numbers."""
    draw = random.Random(seed)
    every = {"publish_every": draw.randint(1, 3), "checkpoint_every": draw.randint(2, 4)}
    config = _keeping_all(config_of(broker_config, keys, run_dir, **every))
    await hand_on(client, keys, 0, 6)
    for _ in range(3):
        try:
            await cut_off_at(draw.choice(KILLS), draw.randint(1, 4), monkeypatch, train(config, source))
        except pytest.fail.Exception:
            break  # it ended before it came to that call
        now = await snapshot(client, keys)
        assert now.enqueued == 12
    await train(config, source)
    await assert_each_once(client, keys, config, 6)
    line = await live(client, keys, config)
    steps = sorted({*range(0, 6, every["publish_every"]), 6})
    assert [one.step for one in reversed(line)] == steps
    assert [one.version for one in reversed(line)] == list(range(len(steps)))
    assert line[0].digest == await _digest_without_kills(every, broker_config, client, run_dir, source)
    assert verify(line[0])


async def _digest_without_kills(
    every: dict[str, int], broker: BrokerConfig, client: Any, run_dir: Path, source: Path
) -> str:
    keys = Keys(f"unkilled-{random.getrandbits(64):x}")
    config = _keeping_all(config_of(broker, keys, run_dir / "unkilled", **every))
    await hand_on(client, keys, 0, 6)
    await train(config, source)
    return (await live(client, keys, config))[0].digest


async def _to_a_lost_version(client: Any, keys: Keys, config: Config, source: Path, patch: pytest.MonkeyPatch) -> None:
    """Killed at step 3, version 3, when its last checkpoint was that of version 2."""
    await hand_on(client, keys, 0, 4)
    with patch.context() as only_here:
        await cut_off_at("sluice.consumers.training.step_log.StepRecords.write", 4, only_here, train(config, source))
    assert await WeightsRegistry(client, keys).latest() == 3
    newest = checkpoint.newest(Path(config.run_dir) / config.run / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000002"


async def test_the_same_weights_keep_their_number(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=2))
    await _to_a_lost_version(client, keys, config, source, monkeypatch)
    lost = manifests(config)[3]
    seen: list[int | None] = []
    opened = Session.open

    async def looking(self: Session, *args: Any) -> None:
        await opened(self, *args)
        seen.append(await WeightsRegistry(client, keys).latest())

    monkeypatch.setattr(Session, "open", looking)
    await train(config, source)
    assert seen == [2], "workers leave the lost version at once"
    await assert_each_once(client, keys, config, 4)
    assert manifests(config)[3].digest == lost.digest
    assert [one.version for one in await live(client, keys, config)] == [4, 3, 2, 1, 0]
    assert {one.branch for one in manifests(config).values()} == {0}


async def test_other_weights_get_an_unused_number_on_a_branch_of_their_own(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=2))
    await _to_a_lost_version(client, keys, config, source, monkeypatch)
    state = checkpoint.read_state(Path(config.run_dir) / config.run)
    assert (state.step, state.version, state.is_published) == (2, 2, True)
    await train(config, source, learning_rate=2e-3)
    await assert_each_once(client, keys, config, 4)
    line = await live(client, keys, config)
    assert [(one.version, one.parent, one.branch) for one in line] == [
        (5, 4, 4),
        (4, 2, 4),
        (2, 1, 0),
        (1, 0, 0),
        (0, -1, 0),
    ]


async def test_a_step_without_a_checkpoint_holds_no_credit(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir, checkpoint_every=4)
    await hand_on(client, keys, 0, 4)
    await client.hset(keys.counts, "bytes", sum(len(row[b"b"]) for _, row in await client.xrange(keys.batches)))
    await client.hset(keys.source, mapping={"per_version": 2, "staleness": 1})
    await cut_off_at("sluice.consumers.training.step_log.StepRecords.write", 4, monkeypatch, train(config, source))
    now = await snapshot(client, keys)
    assert (now.trained, now.waiting_batches) == (0, 4), "no checkpoint holds the three steps"
    entries = await client.xrange(keys.batches)
    assert (now.credit.sequences, now.credit.max_ahead) == (2, 2 * 2 + 6)
    assert now.credit.bytes == len(entries[3][1][b"b"])
    monkeypatch.setattr(checkpoint, "save", _looking(checkpoint.save, client, keys))
    await train(config, source)
    await assert_each_once(client, keys, config, 4)
    now = await snapshot(client, keys)
    assert (now.credit.sequences, now.credit.bytes, now.credit.max_ahead) == (0, 0, 2 * 2 + 8)


def _looking(save: Any, client: Any, keys: Keys) -> Any:
    def looked(*args: Any, **options: Any) -> Any:
        assert args[3].step == 4  # the kill undid the three steps, and they came again
        return save(*args, **options)

    return looked
