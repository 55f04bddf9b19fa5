"""A training loop over a real broker: each batch once, whatever is cut off where."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from msgspec.structs import replace
from torch.utils.data import DataLoader

from sluice.consumers.training.checkpoint import TrainerState, read_state, write_state
from sluice.consumers.training.handoff import RolloutDataset, Rollouts
from sluice.consumers.training.session import Session
from sluice.consumers.training.step_log import StepRecords, read_rollouts, read_steps
from sluice.pipeline.broker import streams
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    SluiceError,
    TaskError,
)
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.keys import BATCH_GROUP, Keys
from sluice.pipeline.wire.messages import TrainingBatch, encode
from tests.deadlines import HANG_S
from tests.integration.test_trainer import train
from tests.trainers import random_sample
from tests.training_loops import MakeRun, ctrl_c, ids, load, look, manifest_of, run_of, trained


def test_a_loop_trains_publishes_and_ends_with_the_run(make_run: MakeRun) -> None:
    config = make_run(3, keep_rollouts=None)
    losses: list[float] = []
    with Rollouts(config) as rollouts:
        assert (rollouts.version, rollouts.model_path.name) == (0, "v000000")
        assert verify(manifest_of(config, 0))
        model = load(rollouts.model_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in rollouts.batches():
            assert batch["input_ids"].shape == (2, 13)
            out = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
            out.loss.backward()
            optimizer.step()
            losses.append(out.loss.item())
            with pytest.raises(TaskError, match="numbers"):
                rollouts.publish(model, metrics={"learning_rate": "fast"})  # pyright: ignore[reportArgumentType]
            rollouts.publish(model, metrics={"train/loss": losses[-1], "custom/on": True})
    assert len(losses) == 3
    now = look(config)
    assert (now.trained, now.waiting_batches, now.complete, now.state) == (6, 0, True, "finished")
    assert not now.alive("trainer")
    assert trained(config) == ids(3)
    newest = manifest_of(config, 3)
    assert verify(newest)
    assert newest.probe_score is not None
    assert newest.previous == 2
    assert math.isclose(now.metrics["train/loss"], losses[-1])
    kept = [[sample.seq_id for sample in batch.samples] for _, batch in read_rollouts(run_of(config) / "rollouts")]
    assert [seq_id for step in kept for seq_id in step] == ids(3)
    again = load(run_of(config) / "weights/v000003").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_what_was_given_and_not_finished_comes_again(make_run: MakeRun) -> None:
    config = make_run(2)
    with Rollouts(config) as rollouts:
        first = next(rollouts.batches())
    with Rollouts(config) as rollouts:
        again = [batch["seq_ids"] for batch in rollouts.batches()]
        rollouts.done()
    assert again == [first["seq_ids"], ids(2)[2:]]
    assert trained(config) == ids(2)
    assert look(config).trained == 4


def test_ids_that_the_callers_checkpoint_holds_are_not_given_again(make_run: MakeRun) -> None:
    config = make_run(3)
    with Rollouts(config, seen=[*ids(1), ids(3)[3]]) as rollouts:
        given = [batch["seq_ids"] for batch in rollouts.batches()]
        rollouts.done()
    assert given == [[ids(3)[2], *ids(3)[4:]]]
    assert look(config).complete
    assert sorted(trained(config)) == ids(3), "what the caller's checkpoint holds is trained, for every later process"


def test_one_loop_at_a_time(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(1)
    monkeypatch.setattr(streams, "TTL_S", HANG_S)  # whatever holds up the first, its claim doesn't expire
    monkeypatch.setattr("sluice.consumers.training.session_thread._ACQUIRE_S", 0.1)
    with (
        Rollouts(config),
        pytest.raises(DeadlineExceeded, match=r"another process has held this role.*trainer\.external=true"),
        Rollouts(config),
    ):
        pass


def test_a_role_that_was_taken_over_surfaces_in_the_loop(make_run: MakeRun, sync_client: Any, keys: Keys) -> None:
    config = make_run(2)
    with Rollouts(config) as rollouts:
        next(rollouts.batches())
        sync_client.set(f"{keys.owner}trainer", "another")
        with pytest.raises(LeaseLost):
            rollouts.publish(rollouts.model_path)
        with pytest.raises(LeaseLost):
            rollouts.done()
    now = look(config)
    assert (now.trained, now.latest_version) == (0, 0)


def test_waiting_for_batches_has_a_deadline_with_a_cause(make_run: MakeRun) -> None:
    config = make_run(1, last=False)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with pytest.raises(DeadlineExceeded, match=r"0 s without training batches.*2 samples are handed out"):
            next(batches)
        assert look(config).alive("trainer"), "the session goes on"
        rollouts.done()
    with pytest.raises(SluiceError, match="are closed"):
        rollouts.done()


def test_a_data_loader_gives_the_same_batches_in_one_process_alone(make_run: MakeRun) -> None:
    config = make_run(2)
    with Rollouts(config) as rollouts:
        dataset = RolloutDataset(rollouts)
        given = []
        with pytest.raises(ConfigError, match="num_workers=0"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
        for batch in DataLoader(dataset, batch_size=None, num_workers=0):
            given += batch["seq_ids"]
            rollouts.done()
    assert given == ids(2)
    assert look(config).complete


def test_what_done_finished_never_comes_again_though_its_ack_was_cut_off(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(2)

    async def ends(*_: Any) -> None:
        raise RuntimeError("cut off")

    with Rollouts(config) as rollouts:
        next(rollouts.batches())
        with monkeypatch.context() as patch:
            patch.setattr(Session, "_ack", ends)
            with pytest.raises(RuntimeError, match="cut off"):
                rollouts.done()
    assert look(config).trained == 0
    with Rollouts(config) as rollouts:
        assert look(config).trained == 2
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(2)[2:]]
        rollouts.publish(rollouts.model_path)
    assert trained(config) == ids(2)
    assert look(config).complete


def test_a_batch_that_is_brought_again_while_it_is_given_is_given_once(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """The broker lost its newest part, and the consumer handed the batch on once more."""
    config = make_run(1, last=False)
    [(first, fields)] = sync_client.xrange(keys.batches)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        assert next(batches)["seq_ids"] == ids(1)
        sync_client.xack(keys.batches, BATCH_GROUP, first)
        sync_client.xdel(keys.batches, first)
        sync_client.xadd(keys.batches, fields)
        sync_client.hset(keys.source, "exhausted", 1)
        assert list(batches) == []
        rollouts.publish(rollouts.model_path)
    assert trained(config) == ids(1)
    now = look(config)
    assert (now.trained, now.waiting_batches, now.complete) == (2, 0, True)


def test_a_model_that_is_a_version_of_another_run_starts_at_step_0(make_run: MakeRun, tmp_path: Path) -> None:
    """Its directory says how far that run had come; this one has trained nothing."""
    config = make_run(2)
    foreign = tmp_path / "foreign"
    shutil.copytree(config.model.path, foreign)
    write_state(foreign, TrainerState(step=7, samples=9, unacked=[("1-0", 2)], recent=ids(1)))
    config = replace(config, model=replace(config.model, path=str(foreign)))
    for left in (ids(2)[:2], ids(2)[2:]):
        with Rollouts(config) as rollouts:
            assert next(rollouts.batches())["seq_ids"] == left
            rollouts.publish(rollouts.model_path)
    assert [line["step"] for line in read_steps(run_of(config) / "trained.jsonl")] == [1, 2]
    assert look(config).complete


def test_what_ctrl_c_kept_from_the_loop_is_given_to_the_next_one(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """The interrupted wait goes on in the session's thread, and takes a batch that nobody sees."""
    config = make_run(1, last=False, batch_wait_s=HANG_S)
    late = TrainingBatch(batch_id="1", samples=[random_sample(f"1-{member}", 12 + member) for member in range(2)])
    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        assert next(batches)["seq_ids"] == ids(1)
        ctrl_c(lambda: next(batches), lambda: waits_for_batches(sync_client, keys))
        sync_client.xadd(keys.batches, {"b": encode(late)})
        for name in ("enqueued", "accepted"):
            sync_client.hincrby(keys.counts, name, 2)
        sync_client.hset(keys.source, "exhausted", 1)
        rollouts.publish(rollouts.model_path)
        assert look(config).trained == 2, "the loop has seen the first batch alone"
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(2)[2:]]
        rollouts.done()
    assert trained(config) == ids(2)
    assert look(config).complete


def waits_for_batches(client: Any, keys: Keys) -> bool:
    return any(b"training batches from the consumers" in row for row in client.hvals(keys.processes))


def test_a_loader_that_fetches_ahead_finishes_what_the_loop_names(make_run: MakeRun) -> None:
    """accelerate's has fetched the next batch before it gives this one."""
    config = make_run(3)
    with Rollouts(config) as rollouts:
        given: list[list[str]] = []
        for batch in prepare_data_loader(DataLoader(RolloutDataset(rollouts), batch_size=None, num_workers=0)):
            given.append(batch["seq_ids"])
            if len(given) == 1:
                for end in (lambda: rollouts.publish(rollouts.model_path), rollouts.done):
                    with pytest.raises(TaskError, match=r"2 batches.*fetched one ahead.*seq_ids=batch\['seq_ids'\]"):
                        end()
                assert look(config).trained == 0
            rollouts.publish(rollouts.model_path, seq_ids=batch["seq_ids"])
            assert look(config).trained == 2 * len(given)
    assert given == [ids(3)[:2], ids(3)[2:4], ids(3)[4:]]
    assert [line["seq_ids"] for line in read_steps(run_of(config) / "trained.jsonl")] == given
    assert look(config).complete


def test_half_a_batch_may_be_finished_and_the_rest_comes_again(make_run: MakeRun) -> None:
    config = make_run(2)
    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        next(batches)
        with pytest.raises(TaskError, match="nobody:0: not finished: it was not delivered"):
            rollouts.done(seq_ids=["nobody:0"])
        rollouts.publish(rollouts.model_path, seq_ids=[ids(2)[0], ids(2)[3]])
        assert look(config).trained == 0, "neither batch is whole"
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [[ids(2)[1], ids(2)[2]]]
        rollouts.done(seq_ids=ids(2)[1:2])
        assert look(config).trained == 2
        rollouts.done()
    assert sorted(trained(config)) == ids(2)
    assert (look(config).trained, look(config).complete) == (4, True)


def test_ids_of_a_callers_checkpoint_stay_trained_for_a_loop_that_does_not_name_them(
    make_run: MakeRun, sync_client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker loses the acks and brings the batches again; also after an attempt at a step that failed."""
    config = make_run(3)
    raw = [fields for _, fields in sync_client.xrange(keys.batches)]

    async def ends(*_: Any, **__: Any) -> None:
        raise RuntimeError("cut off")

    with Rollouts(config, seen=ids(3)[2:]) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(StepRecords, "show", ends)
            with pytest.raises(RuntimeError, match="cut off"):
                rollouts.publish(rollouts.model_path)
        assert list(batches) == []
        rollouts.publish(rollouts.model_path)
    assert sorted(trained(config)) == ids(3)
    for fields in raw:
        sync_client.xadd(keys.batches, fields)
    with Rollouts(config) as rollouts:
        assert list(rollouts.batches()) == []
    assert sorted(trained(config)) == ids(3)


def test_a_loop_continues_what_the_built_in_trainer_began_and_that_one_refuses_the_reverse(
    make_run: MakeRun, source: Path
) -> None:
    config = make_run(4)
    asyncio.run(train(replace(config, trainer=replace(config.trainer, max_versions=2)), source))
    began = read_state(run_of(config))
    assert (began.step, began.version, began.samples, began.recent) == (2, 2, 4, ids(2))
    with Rollouts(config) as rollouts:
        assert (rollouts.version, rollouts.model_path.name) == (2, "v000002")
        assert next(rollouts.batches())["seq_ids"] == ids(3)[4:]
        rollouts.done()
    refuse(config, source)
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(4)[6:]]
        rollouts.publish(rollouts.model_path)
    (run_of(config) / "handoff.json").unlink()
    refuse(config, source)
    assert [line["step"] for line in read_steps(run_of(config) / "trained.jsonl")] == [1, 2, 3, 4]
    assert trained(config) == ids(4)


def refuse(config: Config, source: Path) -> None:
    before = trained(config)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(train(config, source))
    assert caught.group_contains(ConfigError, match=r"handoff.json: a training loop of your own has trained this")
    assert trained(config) == before
