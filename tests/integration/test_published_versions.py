"""Versions without a checkpoint: a kill undoes them, and nothing else: each sample once, one line of live versions."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
import uuid
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from sluice.consumers.training import checkpoint
from sluice.consumers.training.model import load_policy, probe_score
from sluice.consumers.training.session import Make, Session
from sluice.consumers.training.step_log import StepRecords
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import first_cause
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.carriers import carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.weights.versions import numbered_directories, read_manifest, verify
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from tests.cut_off import cut_off_at
from tests.deadlines import HANG_S
from tests.integration.test_trainer import assert_each_once, config_of, hand_on, train
from tests.roles import eventually
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
    f"{_VERSIONS}.remove",
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


@pytest.mark.parametrize(
    ("seed", "transport"), [*((seed, "directory") for seed in range(6)), (6, "engine"), (7, "delta"), (8, "delta")]
)
async def test_a_run_with_kills_ends_with_the_weights_of_one_without(
    seed: int,
    transport: Literal["directory", "engine", "delta"],
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
    config = replace(config, weights=replace(config.weights, transport=transport, cache_dir=str(run_dir / "cache")))
    await hand_on(client, keys, 0, 6)
    for _ in range(3):
        try:
            await cut_off_at(draw.choice(KILLS), draw.randint(1, 4), monkeypatch, train(config, source))
        except pytest.fail.Exception:
            break  # it ended before it came to that call
        now = await snapshot(client, keys)
        assert now.enqueued == 12
    await train(config, source)
    if transport != "delta":  # it reads a version where its manifest says, which is in a store there
        await assert_each_once(client, keys, config, 6)
    line = await live(client, keys, config)
    steps = sorted({*range(0, 6, every["publish_every"]), 6})
    assert [one.step for one in reversed(line)] == steps
    assert [one.version for one in reversed(line)] == list(range(len(steps)))
    assert line[0].digest == await _digest_without_kills(every, broker_config, client, run_dir, source)
    found = carrier_of(config).fetch(line[0])
    assert verify(line[0], directory=found)
    assert (MEMORY in found.parents) == (transport == "engine")


async def _digest_without_kills(
    every: dict[str, int], broker: BrokerConfig, client: Any, run_dir: Path, source: Path
) -> str:
    keys = Keys(f"unkilled-{uuid.uuid4().hex}")
    config = _keeping_all(config_of(broker, keys, run_dir / "unkilled", **every))
    await hand_on(client, keys, 0, 6)
    await train(config, source)
    return (await live(client, keys, config))[0].digest


def _registered_at_once(patch: pytest.MonkeyPatch) -> None:
    """A kill at a step finds the versions before it registered."""
    begin = Session.begin_publish

    async def publish(self: Session, make: Make) -> None:
        await begin(self, make)
        await self.published()

    patch.setattr(Session, "begin_publish", publish)


async def _to_a_lost_version(client: Any, keys: Keys, config: Config, source: Path, patch: pytest.MonkeyPatch) -> None:
    """Killed at step 3, version 3, when its last checkpoint was that of version 2."""
    await hand_on(client, keys, 0, 4)
    with patch.context() as only_here:
        _registered_at_once(only_here)
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


async def test_a_broker_that_forgot_the_last_commits_version_takes_it_back(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lost the second in which version 2 was registered; the trainer had gone on to version 3 by then."""
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=2))
    await _to_a_lost_version(client, keys, config, source, monkeypatch)
    await client.hdel(keys.versions, "2", "2:digest", "3", "3:digest")
    await client.hset(keys.versions, "highest", 3)
    await train(config, source)
    await assert_each_once(client, keys, config, 4)
    assert [one.version for one in await live(client, keys, config)] == [4, 3, 2, 1, 0]


async def test_retention_holds_between_two_checkpoints(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir, checkpoint_every=20)
    config = replace(config, weights=replace(config.weights, retention=4))
    await hand_on(client, keys, 0, 8)
    with monkeypatch.context() as patch:
        _registered_at_once(patch)
        await cut_off_at("sluice.consumers.training.step_log.StepRecords.write", 8, patch, train(config, source))
    assert sorted(manifests(config)) == [0, 4, 5, 6, 7], "the newest four, and the one that a kill goes back to"
    known = [number for number in range(9) if await WeightsRegistry(client, keys).get(number) is not None]
    assert known == [0, 4, 5, 6, 7]
    await train(config, source)
    await assert_each_once(client, keys, config, 8)


async def test_the_last_weights_are_published_though_nobody_knew_that_they_were_the_last(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, publish_every=4))
    await hand_on(client, keys, 0, 3, last=False)
    follows = Session.nothing_follows

    async def something_else_ends(self: Session) -> bool:
        if self.state.step == 3:
            assert not await follows(self)  # a group is still open; then it dies
            await client.hset(keys.source, "exhausted", 1)
        return False

    monkeypatch.setattr(Session, "nothing_follows", something_else_ends)
    await train(config, source)
    assert [one.step for one in await live(client, keys, config)] == [3, 0]
    for _ in range(2):  # its checkpoint was written before, and doesn't know of the version
        await train(config, source)
        assert await WeightsRegistry(client, keys).latest() == 1
    await assert_each_once(client, keys, config, 3)


async def test_credit_that_the_broker_lost_is_given_again(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, checkpoint_every=9, batch_wait_s=200)
    await hand_on(client, keys, 0, 2, last=False)
    training = asyncio.create_task(train(config, source))

    async def stepped(samples: int) -> bool:
        return (await snapshot(client, keys)).stepped == samples

    await eventually(lambda: stepped(4), "two steps")
    await client.hset(keys.counts, mapping={"stepped": 2, "stepped_bytes": 0})
    await eventually(lambda: stepped(4), "the trainer to see it")
    await hand_on(client, keys, 2, 1)
    await training
    await assert_each_once(client, keys, config, 3)


async def test_steps_that_hold_much_in_the_broker_get_their_checkpoint(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir, checkpoint_every=20)
    config = replace(config, producer=replace(config.producer, max_in_flight_mb=1))
    await hand_on(client, keys, 0, 4)
    monkeypatch.setattr(Session, "holds_much", property(lambda self: self._stepped().samples >= 4))
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda *args, **options: saved.append(args[3].step) or save(*args, **options)
    )
    await train(config, source)
    assert saved == [2, 4]
    await assert_each_once(client, keys, config, 4)


async def test_a_loop_of_ones_own_starts_at_the_weights_that_are_durable(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=2, publish_every=4))
    home = Path(config.run_dir) / config.run
    await hand_on(client, keys, 0, 4)
    cut = "sluice.consumers.training.step_log.StepRecords.write"
    with monkeypatch.context() as patch:
        await cut_off_at(
            cut, 2, patch, train(replace(config, trainer=replace(config.trainer, publish_every=1)), source)
        )
    assert (checkpoint.read_state(home).step, checkpoint.model_of(home)) == (0, home / "weights" / "v000000")
    with monkeypatch.context() as patch:
        await cut_off_at(cut, 4, patch, train(config, source))
    assert (checkpoint.read_state(home).step, checkpoint.model_of(home)) == (2, home / "checkpoints" / "step-000002")
    state = checkpoint.read_state(home)
    state.step = 3
    checkpoint.write_state(home, state)
    assert (checkpoint.read_state(home).step, checkpoint.model_of(home)) == (3, home / "checkpoints" / "step-000002")


def _in_dtype(config: Config, dtype: str) -> Config:
    return replace(config, weights=replace(config.weights, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_step_does_not_wait_for_the_version_before_it(
    dtype: str, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The write of version 1 goes on until the step after it is done."""
    config = _in_dtype(_keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=9)), dtype)
    await hand_on(client, keys, 0, 3)
    stepped, written, shown = threading.Event(), versions.write_version, StepRecords.show

    def slow(source: Path, root: Path, manifest: WeightVersion, *rest: Any) -> WeightVersion:
        if manifest.version == 1:
            assert stepped.wait(HANG_S), "the next step waits for version 1"
        return written(source, root, manifest, *rest)

    async def showing(self: StepRecords, step: int, values: Any) -> None:
        await shown(self, step, values)
        if step == 2:
            stepped.set()

    with monkeypatch.context() as patch:
        patch.setattr(versions, "write_version", slow)
        patch.setattr(StepRecords, "show", showing)
        await train(config, source)
    await assert_each_once(client, keys, config, 3)
    line = await live(client, keys, config)
    assert [(one.version, one.step) for one in line] == [(3, 3), (2, 2), (1, 1), (0, 0)]
    kinds = [{kind for kind, _ in one.tensors.values()} for one in line]
    assert kinds == [{"F32" if dtype == "float32" else "BF16"}] * 3 + [{"F32"}], "the first is the model as it came"
    for one in line[:-1]:
        registered = await WeightsRegistry(client, keys).get(one.version)
        assert registered is not None
        found = probe_score(load_policy(Path(one.path), config.model), list(registered.probe_token_ids))
        assert one.probe_score == pytest.approx(found, abs=1e-4)
        assert verify(one)


async def test_a_version_that_cannot_be_written_ends_the_trainer_with_its_cause(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=9, batch_wait_s=60))
    await hand_on(client, keys, 0, 1, last=False)  # it has nothing to do but to wait for the next batch
    written = versions.write_version

    def full(source: Path, root: Path, manifest: WeightVersion, *rest: Any) -> WeightVersion:
        if manifest.version:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(source, root, manifest, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(versions, "write_version", full)
        with pytest.raises(ExceptionGroup) as caught:
            await train(config, source)
    assert "No space left on device" in str(first_cause(caught.value))
    assert await WeightsRegistry(client, keys).latest() == 0
    assert not list((Path(config.run_dir) / config.run / "weights").glob(".v*.tmp"))
    await hand_on(client, keys, 1, 1)
    await train(config, source)
    await assert_each_once(client, keys, config, 2)
    assert [one.step for one in await live(client, keys, config)] == [2, 1, 0]


@pytest.mark.parametrize("retention", [2, 3, 5, 99])
async def test_as_many_versions_are_kept_as_asked_however_few_the_line_remembers(
    retention: int, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoint, "_RECENT_VERSIONS", 3)
    config = config_of(broker_config, keys, run_dir)
    config = replace(config, weights=replace(config.weights, retention=retention))
    await hand_on(client, keys, 0, 7)
    await train(config, source)
    there = [number for number, _ in versions.numbered_directories(Path(config.run_dir) / config.run / "weights")]
    assert there == list(range(8))[-retention:]


async def test_a_version_that_takes_too_long_is_named(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=9))
    await hand_on(client, keys, 0, 1)
    await train(config, source)  # versions 0 and 1 have the time that they take
    await hand_on(client, keys, 1, 2)
    config = replace(config, weights=replace(config.weights, publish_timeout_s=1.0))
    go, written = threading.Event(), versions.write_version

    def stuck(source: Path, root: Path, manifest: WeightVersion, *rest: Any) -> WeightVersion:
        if manifest.version == 2:
            go.wait(HANG_S)
        return written(source, root, manifest, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(versions, "write_version", stuck)
        with pytest.raises(ExceptionGroup) as caught:
            await train(config, source)
    go.set()
    assert "version 2 was not written within 1 s" in str(first_cause(caught.value))
    assert await WeightsRegistry(client, keys).latest() == 1, "its successor may have registered another one by then"


@pytest.mark.parametrize("checkpoint_every", [1, 2])
@pytest.mark.parametrize("place", KILLS)
async def test_a_run_in_bfloat16_continues_from_its_float32_masters(
    place: str, checkpoint_every: int, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path,
    source: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = _in_dtype(
        _keeping_all(config_of(broker_config, keys, run_dir, checkpoint_every=checkpoint_every)), "bfloat16"
    )
    await hand_on(client, keys, 0, 4)
    with contextlib.suppress(pytest.fail.Exception):  # it may never come to that call
        await cut_off_at(place, 3, monkeypatch, train(config, source))
    await train(config, source)
    await assert_each_once(client, keys, config, 4)
    line = await live(client, keys, config)
    assert [one.step for one in line] == [4, 3, 2, 1, 0]
    assert all(one.dtype == "bfloat16" for one in line[:-1])
    found = checkpoint.newest(Path(config.run_dir) / config.run / "checkpoints")
    assert found is not None
    assert {kind for kind, _ in versions.tensor_table(found).values()} == {"F32"}


async def test_a_run_keeps_its_newest_version_when_its_dtype_is_changed(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = _keeping_all(config_of(broker_config, keys, run_dir))
    await hand_on(client, keys, 0, 2, last=False)
    short = replace(config, trainer=replace(config.trainer, max_versions=2))
    await train(short, source)
    await hand_on(client, keys, 2, 1)
    await train(_in_dtype(config, "bfloat16"), source)
    await train(config, source)
    await assert_each_once(client, keys, config, 3)
    assert [one.dtype for one in await live(client, keys, config)] == ["bfloat16", "", "", ""]
