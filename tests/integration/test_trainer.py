"""The trainer against a real broker: each batch once, whatever is cut off where."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.consumers.training import checkpoint, session
from sluice.consumers.training.session import Session
from sluice.consumers.training.step_log import read_rollouts, read_steps
from sluice.consumers.training.trainer import Trainer
from sluice.consumers.training.trainer import train as train_role
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Entry, Ownership
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerDataGone, DeadlineExceeded, LeaseLost, ModelError, first_cause
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.keys import BATCH_GROUP, Keys
from sluice.pipeline.wire.messages import ImageRef, TrainingBatch, encode
from tests.clock import Ahead
from tests.cut_off import CutOff, cut_off_at
from tests.deadlines import HANG_S
from tests.faulty_models import save_faulty
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, **trainer: Any) -> Config:
    producer = {"samples_per_version": 2, "max_in_flight": 64}
    return run_config(broker, keys, run_dir, producer=producer, trainer={"batch_wait_s": 0.3, **trainer})


async def hand_on(client: Any, keys: Keys, first: int, count: int, *, last: bool = True) -> None:
    """Batches of two samples, as a consumer leaves them, and the counts that go with them."""
    for number in range(first, first + count):
        samples = [random_sample(f"{number}-{member}", 12) for member in range(2)]
        await client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=str(number), samples=samples))})
        await client.hincrby(keys.counts, "enqueued", 2)
        await client.hincrby(keys.counts, "accepted", 2)
    if last:
        await client.hset(keys.source, "exhausted", 1)


async def train(config: Config, source: Path, *, learning_rate: float = 1e-3) -> None:
    async with role_of(config, "trainer", "trainer") as role:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        try:
            await Trainer(role, owner, train_step(source, learning_rate=learning_rate), source).run()
        finally:
            await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


def trained(config: Config) -> Counter[str]:
    lines = read_steps(Path(config.run_dir) / config.run / "trained.jsonl")
    return Counter(seq_id for line in lines for seq_id in line["seq_ids"])


async def assert_each_once(client: Any, keys: Keys, config: Config, batches: int) -> None:
    assert trained(config) == Counter(f"{number}-{member}:0" for number in range(batches) for member in range(2))
    now = await snapshot(client, keys)
    assert (now.trained, now.waiting_batches, now.complete) == (2 * batches, 0, True)
    latest = await WeightsRegistry(client, keys).latest()
    manifest = await WeightsRegistry(client, keys).get(latest or 0)
    assert manifest is not None
    assert verify(manifest)
    newest = checkpoint.newest(Path(config.run_dir) / config.run / "checkpoints")
    assert newest is not None


async def test_batches_become_steps_and_versions(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 3)
    await train(config, source)
    await assert_each_once(client, keys, config, 3)
    assert (await snapshot(client, keys)).latest_version == 3
    await train(config, source)  # once more: nothing is left
    await assert_each_once(client, keys, config, 3)


CUTS = {
    "before the checkpoint": ("sluice.consumers.training.checkpoint.save", 2),
    "after the checkpoint, before the version's files": ("sluice.consumers.training.session.Session._write_version", 3),
    "after the version's files, before the ack": ("sluice.consumers.training.session.Session._ack", 3),
    "after the ack, before the publication": ("sluice.consumers.training.session.Session._register", 3),
    "at the registration": ("sluice.pipeline.weights.registry.WeightsRegistry.register", 3),
    "after the registration, before the old versions go": ("sluice.pipeline.weights.versions.remove", 3),
    "before the first version": ("sluice.consumers.training.session.Session._write_version", 1),
    "before the first version is registered": ("sluice.consumers.training.session.Session._register", 1),
    "before the lines of a step": ("sluice.consumers.training.step_log.StepRecords.write", 2),
    "after the lines of a step": ("sluice.consumers.training.step_log.StepRecords.show", 2),
    "before the old checkpoints go": ("sluice.consumers.training.checkpoint.prune", 1),
}


@pytest.mark.parametrize("place", CUTS)
async def test_a_restart_trains_each_sequence_once_wherever_it_was_cut_off(
    place: str,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 3)
    await cut_off_at(*CUTS[place], monkeypatch, train(config, source))
    await train(config, source)
    await assert_each_once(client, keys, config, 3)


CUTS_BESIDE = {
    "at the copy": ("sluice.consumers.training.learner.Learner.begin", 2),
    "after the copy, before the version": ("sluice.consumers.training.session.Session.publish", 2),
    "while the checkpoint is written": ("sluice.consumers.training.checkpoint.Unfinished.complete", 2),
    "before its rename": ("sluice.consumers.training.checkpoint.fsync_tree", 3),
    "after the checkpoint, before the ack": ("sluice.consumers.training.session.Session._ack_behind", 2),
    "before the old checkpoints go": ("sluice.consumers.training.checkpoint.prune", 2),
}


@pytest.mark.parametrize("place", CUTS_BESIDE)
async def test_the_same_with_checkpoints_beside_the_steps(
    place: str,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(broker_config, keys, run_dir, async_checkpoints=True)
    await hand_on(client, keys, 0, 4)
    await cut_off_at(*CUTS_BESIDE[place], monkeypatch, train(config, source))
    await train(config, source)
    await assert_each_once(client, keys, config, 4)


async def test_steps_go_on_while_a_checkpoint_is_written(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first is acked before it's on disk, and the second waits for it."""
    config = config_of(broker_config, keys, run_dir, async_checkpoints=True)
    await hand_on(client, keys, 0, 4)
    writing, go_on, written = threading.Event(), threading.Event(), list[int]()
    real = checkpoint.Unfinished.complete

    def slowly(self: checkpoint.Unfinished, state: checkpoint.TrainerState, *rest: Any) -> Path:
        writing.set()
        assert go_on.wait(HANG_S)
        written.append(state.step)
        return real(self, state, *rest)

    monkeypatch.setattr(checkpoint.Unfinished, "complete", slowly)
    training = asyncio.create_task(train(config, source))

    async def two_steps() -> bool:
        return (await snapshot(client, keys)).stepped == 4

    await eventually(two_steps, "the second step")
    assert writing.is_set()
    assert (await snapshot(client, keys)).trained == 0
    assert not written
    go_on.set()
    await training
    assert written == [1, 2, 3, 4]
    await assert_each_once(client, keys, config, 4)


async def test_a_checkpoint_that_cannot_be_written_beside_the_steps_ends_the_trainer(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir, async_checkpoints=True)
    await hand_on(client, keys, 0, 3)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(ExceptionGroup) as caught:
            await train(config, source)
    assert "No space left" in str(first_cause(caught.value))
    await train(config, source)
    await assert_each_once(client, keys, config, 3)


async def test_a_checkpoint_beside_the_steps_has_its_time(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir, async_checkpoints=True, checkpoint_timeout_s=0.5)
    await hand_on(client, keys, 0, 3)
    disk = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Unfinished, "complete", lambda *_: disk.wait(HANG_S))
        with pytest.raises(ExceptionGroup) as caught:
            await train(config, source)
        disk.set()
    cause = first_cause(caught.value)
    assert isinstance(cause, DeadlineExceeded)
    assert "step 1 was not on disk after 0.5 s" in str(cause)


async def test_a_save_that_outlasts_its_role_replaces_nothing_of_its_successor(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 2)
    digests = checkpoint._digests
    began, go = threading.Event(), threading.Event()

    def slow(directory: Path) -> dict[str, str]:
        if not began.is_set():
            began.set()
            assert go.wait(HANG_S)
        return digests(directory)

    def inodes() -> list[int]:
        root = Path(config.run_dir) / config.run / "checkpoints"
        return [path.stat().st_ino for path in sorted(root.glob("step-*"))]

    monkeypatch.setattr(checkpoint, "_digests", slow)
    replaced = asyncio.create_task(train(config, source))
    assert await asyncio.to_thread(began.wait, 120)
    await client.delete(f"{keys.owner}trainer")  # its claim has expired
    await train(config, source)
    files = inodes()
    go.set()
    with pytest.raises(ExceptionGroup) as caught:
        await replaced
    assert isinstance(first_cause(caught.value), LeaseLost)
    assert inodes() == files
    await train(config, source)
    await assert_each_once(client, keys, config, 2)


async def test_steps_since_the_last_checkpoint_are_not_lost_at_the_end(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, checkpoint_every=2, batch_wait_s=5.0)
    await hand_on(client, keys, 0, 3)
    await train(config, source)
    await assert_each_once(client, keys, config, 3)


async def test_max_versions_ends_it(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    await hand_on(client, keys, 0, 3)
    await train(config_of(broker_config, keys, run_dir, max_versions=1), source)
    now = await snapshot(client, keys)
    assert (now.latest_version, now.trained, now.waiting_batches) == (1, 2, 2)
    config = config_of(broker_config, keys, run_dir)
    await train(config, source)
    await assert_each_once(client, keys, config, 3)


@pytest.mark.parametrize(("keep", "steps"), [(0, []), (2, [2, 3]), (None, [1, 2, 3])])
async def test_the_newest_steps_samples_stay_on_disk(
    keep: int | None,
    steps: list[int],
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that is redone after a kill, without a policy loss too."""
    config = config_of(broker_config, keys, run_dir, keep_rollouts=keep)
    await hand_on(client, keys, 0, 3)
    folder = Path(config.run_dir) / config.run / "rollouts"

    def cut(root: Path, *_: Any) -> None:
        assert folder.joinpath("step-000001.msgpack").exists() == (keep != 0)
        raise CutOff

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", cut)
        with pytest.raises(ExceptionGroup):
            await train(config, source)
    await train(config, source)
    found = {step: [sample.seq_id for sample in batch.samples] for step, batch in read_rollouts(folder)}
    assert found == {step: [f"{step - 1}-0:0", f"{step - 1}-1:0"] for step in steps}


async def test_a_trainer_whose_rows_are_wrong_does_not_start(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, tmp_path: Path
) -> None:
    model = {"path": str(save_faulty("window dropped in rows", tmp_path / "model")), "trust_remote_code": True}
    config = run_config(broker_config, keys, run_dir, model=model)
    await hand_on(client, keys, 0, 3)
    with pytest.raises(ExceptionGroup) as caught:
        await train_role(config)
    cause = first_cause(caught.value)
    assert isinstance(cause, ModelError)
    assert cause.exit_code == 5
    assert "FaultyForCausalLM" in str(cause)
    now = await snapshot(client, keys)
    assert (now.latest_version, now.trained, now.waiting_batches) == (None, 0, 3)


async def test_a_sample_with_an_image_is_dropped_by_name(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """Consumers of this release hand none on; a batch may have been stored by another."""
    seen = msgspec.structs.replace(random_sample("seen", 12), images=[ImageRef(path="a.png")])
    batch = TrainingBatch(batch_id="0", samples=[random_sample("text", 12), seen])
    await client.xadd(keys.batches, {"b": encode(batch)})
    await client.hset(keys.counts, mapping={"enqueued": 2, "accepted": 2})
    await client.hset(keys.source, "exhausted", 1)
    config = config_of(broker_config, keys, run_dir)
    await train(config, source)
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.complete) == (1, 1, True)
    assert trained(config) == Counter(["text:0"])


async def test_a_wait_without_batches_names_its_cause(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await train(config_of(broker_config, keys, run_dir), source)
    cause = first_cause(caught.value)
    assert isinstance(cause, DeadlineExceeded)
    assert "no training batch" in str(cause)


async def test_groups_that_are_filtered_are_progress(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Easy or hard prompts alone: the producer sends others in their place, so the trainer waits on. Then it ends."""
    config = config_of(broker_config, keys, run_dir, batch_wait_s=100.0)
    clock, looks, real = Ahead(monkeypatch, session), 0, Session._snapshot

    async def look(self: Session) -> Snapshot:
        nonlocal looks
        looks, clock.by_s = looks + 1, clock.by_s + 60
        if looks == 5:
            await hand_on(client, keys, 0, 1, last=False)
        elif looks <= 10:
            for name in ("enqueued", "dropped", "dropped:zero_variance"):
                await client.hincrby(keys.counts, name, 2)
        return await real(self)

    monkeypatch.setattr(Session, "_snapshot", look)
    with pytest.raises(ExceptionGroup) as caught:
        await train(config, source)
    assert "no training batch for 100 s" in str(first_cause(caught.value))
    assert trained(config).total() == 2
    assert looks == 12, "two looks at which nothing new was filtered take longer than it waits"


async def test_a_batch_that_the_broker_brings_again_is_counted_but_not_trained(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    """A broker that lost power undoes its last second: the ack, with its count, and the batch is there again."""
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 2)
    await train(config, source)
    await client.hincrby(keys.counts, "trained", -2)
    await client.hincrby(keys.counts, "enqueued", -2)
    await client.hincrby(keys.counts, "accepted", -2)
    await hand_on(client, keys, 1, 1)
    await train(config, source)
    await assert_each_once(client, keys, config, 2)


async def test_a_repeat_of_a_step_that_no_checkpoint_holds_is_not_acked_before_it(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lost its newest part, its consumer handed the batch on once more, and then the trainer is killed."""
    config = config_of(broker_config, keys, run_dir, checkpoint_every=2)
    await hand_on(client, keys, 0, 2, last=False)
    [(first, fields), _] = await client.xrange(keys.batches)
    real = Session.step

    async def then_repeated(self: Session, *args: Any, **options: Any) -> bool:
        stepped = await real(self, *args, **options)
        if self.state.step == 1:
            await client.xack(keys.batches, BATCH_GROUP, first)
            await client.xdel(keys.batches, first)
            self._unread.appendleft(Entry((await client.xadd(keys.batches, fields)).decode(), fields))
        return stepped

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", then_repeated)
        await cut_off_at("sluice.consumers.training.checkpoint.save", 1, patch, train(config, source))
    assert (await snapshot(client, keys)).waiting_batches == 2, "the repeat is all that is left of the first batch"
    await client.hset(keys.source, "exhausted", 1)
    await train(config, source)
    await assert_each_once(client, keys, config, 2)


async def test_a_loss_that_is_not_finite_stops_nobody(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir)
    await hand_on(client, keys, 0, 2)
    real = Trainer._train

    async def poisoned(self: Trainer, batches: Any) -> None:
        run = self._learner.run
        lost = {"train/loss": math.nan}
        self._learner.run = lambda *args, **options: run(*args, **options) | lost  # pyright: ignore[reportAttributeAccessIssue]
        await real(self, batches)

    monkeypatch.setattr(Trainer, "_train", poisoned)
    await train(config, source)
    await assert_each_once(client, keys, config, 2)


async def test_a_broker_whose_data_are_gone_repeats_no_training(
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "_RECENT_IDS", 2)
    config = config_of(broker_config, keys, run_dir, checkpoint_every=2)
    await hand_on(client, keys, 0, 6)
    await train(config, source)
    await client.delete(*[name async for name in client.scan_iter(match=f"*{keys.run}*")])
    await hand_on(client, keys, 0, 8)
    await train(config, source)
    assert trained(config) == Counter(f"{number}-{member}:0" for number in range(8) for member in range(2))
    now = await snapshot(client, keys)
    assert (now.trained, now.waiting_batches, now.complete) == (16, 0, True)
    assert now.credit.max_ahead is None or now.credit.max_ahead <= 3 * 2 * 2 + 16
    assert "the broker's data are gone" in capsys.readouterr().err


async def test_a_trainer_whose_broker_is_flushed_says_so(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, batch_wait_s=120)
    await hand_on(client, keys, 0, 1, last=False)
    training = asyncio.create_task(train(config, source))
    await eventually(lambda: is_trained(client, keys, 2), "the first step")
    await client.delete(*[name async for name in client.scan_iter(match=f"*{keys.run}*")])
    with pytest.raises((BrokerDataGone, ExceptionGroup)) as caught:
        await training
    assert isinstance(first_cause(caught.value), BrokerDataGone)
    assert "another process" not in str(first_cause(caught.value))


async def is_trained(client: Any, keys: Keys, count: int) -> bool:
    return (await snapshot(client, keys)).trained == count
