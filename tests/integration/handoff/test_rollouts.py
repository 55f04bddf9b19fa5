"""A training loop over a real broker: each batch once, whatever is cut off where."""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from msgspec.structs import replace
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from sluice.consumers.training.checkpoint import TrainerState, read_state, write_state
from sluice.consumers.training.handoff import RolloutDataset, Rollouts
from sluice.consumers.training.session import Session
from sluice.consumers.training.step_log import StepRecords, read_rollouts, read_steps
from sluice.pipeline.broker import connection
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    MessageError,
    ModelError,
    SluiceError,
    TaskError,
)
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.keys import BATCH_GROUP, Keys
from sluice.pipeline.wire.messages import DeadLetter, ImageRef, TrainingBatch, decode, encode
from tests.integration.test_trainer import train
from tests.trainers import random_sample

MakeRun = Callable[..., Config]


def look(config: Config) -> Snapshot:
    async def read() -> Snapshot:
        client = connection.connect(config.broker)
        try:
            return await snapshot(client, Keys(config.run))
        finally:
            await client.aclose()

    return asyncio.run(read())


def manifest_of(config: Config, version: int) -> Any:
    async def read() -> Any:
        client = connection.connect(config.broker)
        try:
            return await WeightsRegistry(client, Keys(config.run)).get(version)
        finally:
            await client.aclose()

    return asyncio.run(read())


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def run_of(config: Config) -> Path:
    return Path(config.run_dir) / config.run


def trained(config: Config) -> list[str]:
    return [seq_id for line in read_steps(run_of(config) / "trained.jsonl") for seq_id in line["seq_ids"]]


def ids(count: int) -> list[str]:
    return [f"{number}-{member}:0" for number in range(count) for member in range(2)]


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


@pytest.mark.parametrize(
    "cut",
    ["before the log lines", "after the log lines", "before the version", "before its registration", "before the ack"],
)
def test_each_batch_is_in_the_weights_once_wherever_publishing_is_cut_off(
    make_run: MakeRun, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version directory decides: what it names is finished, what it does not comes again."""
    config = make_run(2)

    async def ends(*_: Any, **__: Any) -> None:
        raise RuntimeError(cut)

    def ends_at_once(*_: Any) -> None:
        raise RuntimeError(cut)

    places: dict[str, tuple[Any, str, Any]] = {
        "before the log lines": (StepRecords, "write", ends_at_once),
        "after the log lines": (StepRecords, "show", ends),
        "before the version": (versions, "write_version", ends_at_once),
        "before its registration": (Session, "_register", ends),
        "before the ack": (Session, "_ack", ends),
    }
    with Rollouts(config) as rollouts:
        model = load(rollouts.model_path)
        next(rollouts.batches())
        with monkeypatch.context() as patch:
            patch.setattr(*places[cut])
            with pytest.raises(RuntimeError, match=cut):
                rollouts.publish(model)
    with Rollouts(config) as rollouts:
        held = 1 if cut in ("before its registration", "before the ack") else 0
        assert rollouts.version == held
        assert look(config).latest_version == held
        given = [batch["seq_ids"] for batch in rollouts.batches()]
        assert given == ([ids(2)[:2], ids(2)[2:]] if not held else [ids(2)[2:]])
        rollouts.publish(model)
    assert sorted(trained(config)) == ids(2)
    now = look(config)
    assert (now.trained, now.complete) == (4, True)


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


def test_what_is_no_model_of_this_run_is_not_published(make_run: MakeRun, tmp_path: Path) -> None:
    config = make_run(1)
    with Rollouts(config) as rollouts:
        with pytest.raises(ModelError, match=r"tensors differ from .*linear\.weight"):
            rollouts.publish(_Adapter())
        for wrong, words in ((tmp_path / "nosuch", "no such directory"), (torch.nn.Linear(1, 1), "no save_pretrained")):
            with pytest.raises(ModelError, match=words):
                rollouts.publish(wrong)
        assert rollouts.publish(rollouts.model_path) == 1, "a directory of a saved model is one"
    assert not list(run_of(config).rglob("*.tmp"))


class _Adapter:
    def save_pretrained(self, directory: Path) -> None:
        from safetensors.torch import save_file

        save_file({"linear.weight": torch.zeros(1)}, directory / "adapter_model.safetensors")


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


def test_a_publish_that_failed_is_tried_again_as_the_same_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(2)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(versions, "write_version", full)
            with pytest.raises(OSError, match="no space"):
                rollouts.publish(rollouts.model_path)
        assert look(config).trained == 0
        assert rollouts.publish(rollouts.model_path) == 1
        assert look(config).trained == 2
        next(batches)
        rollouts.publish(rollouts.model_path)
    lines = read_steps(run_of(config) / "trained.jsonl")
    assert [(line["step"], line["seq_ids"]) for line in lines] == [(1, ids(2)[:2]), (2, ids(2)[2:])]
    assert look(config).complete


@pytest.mark.parametrize("how", ["publish", "done"])
def test_samples_that_the_loop_drops_are_counted_and_never_come_again(
    make_run: MakeRun, sync_client: Any, keys: Keys, how: str
) -> None:
    """One beside a trained one, both of a batch; the broker then brings both batches again."""
    config = make_run(3)
    raw = [fields for _, fields in sync_client.xrange(keys.batches)]

    def end(rollouts: Rollouts) -> None:
        rollouts.publish(rollouts.model_path) if how == "publish" else rollouts.done()

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        rollouts.drop([ids(1)[0]], "too_old", "3 versions behind")
        with pytest.raises(TaskError, match="0-0:0: not dropped: it was not delivered, or is finished"):
            rollouts.drop([ids(1)[0]], "too_old")
        with pytest.raises(TaskError, match="a reason must be a lower-case word"):
            rollouts.drop([ids(1)[1]], "Too old")
        end(rollouts)
        rollouts.drop(next(batches)["seq_ids"], "too_old")
        end(rollouts)
    now = look(config)
    assert (now.trained, now.dropped, now.reasons) == (1, 3, {"dropped:too_old": 3})
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in sync_client.xrange(keys.dropped)]
    assert [(each.seq_id, each.reason) for each in letters] == [(one, "too_old") for one in (ids(1)[0], *ids(2)[2:])]
    assert letters[0].detail == "3 versions behind"
    for name, by in {"trained": -1, "dropped": -3, "dropped:too_old": -3, "accepted": 3}.items():
        sync_client.hincrby(keys.counts, name, by)
    for fields in raw[:2]:
        sync_client.xadd(keys.batches, fields)
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(3)[4:]]
        end(rollouts)
    assert trained(config) == [ids(1)[1], *ids(3)[4:]]
    now = look(config)
    assert (now.trained, now.reasons, now.complete) == (3, {"dropped:too_old": 3}, True)


def test_what_was_dropped_and_not_finished_comes_again(make_run: MakeRun) -> None:
    config = make_run(1)
    with Rollouts(config) as rollouts:
        rollouts.drop(next(rollouts.batches())["seq_ids"], "too_old")
    assert look(config).dropped == 0
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(1)]
        rollouts.done()
        with pytest.raises(TaskError, match="the run is complete"):
            rollouts.done()
    assert (look(config).trained, look(config).complete) == (2, True)


def test_a_loop_that_drops_whole_batches_goes_on(make_run: MakeRun) -> None:
    """Their credit is free at the next batch: nobody has to finish a step that has nothing in it."""
    config = make_run(3)
    with Rollouts(config) as rollouts:
        for batch in rollouts.batches():
            rollouts.drop(batch["seq_ids"], "zero_advantage")
            if batch["seq_ids"] != ids(3)[4:]:
                continue
            assert look(config).dropped == 4
            rollouts.done()
    now = look(config)
    assert (now.trained, now.dropped, now.complete) == (0, 6, True)


def test_a_sample_that_is_dropped_at_once_does_not_hold_up_its_neighbour(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """It holds credit, so a step that waited for another in its place might wait for ever."""
    config = make_run(0, last=False)
    seen = replace(random_sample("seen", 12), images=[ImageRef(path="a.png")])
    batch = TrainingBatch(batch_id="i", samples=[random_sample("text", 12), seen])
    sync_client.xadd(keys.batches, {"b": encode(batch)})
    for name in ("enqueued", "accepted"):
        sync_client.hincrby(keys.counts, name, 2)
    with Rollouts(config) as rollouts:
        assert next(iter(rollouts.batches()))["seq_ids"] == ["text:0"]
        rollouts.done()
    assert (look(config).trained, look(config).dropped) == (1, 1)


def test_a_batch_that_cannot_be_read_stays_an_error(make_run: MakeRun, sync_client: Any, keys: Keys) -> None:
    config = make_run(1, last=False)
    sync_client.xadd(keys.batches, {"b": b"junk"})
    with Rollouts(config) as rollouts:
        next(rollouts.batches())
        rollouts.done()
        for _ in range(2):
            with pytest.raises(MessageError, match=r"batches .*: not a TrainingBatch"):
                next(rollouts.batches())


def test_samples_with_images_are_dropped_by_name_and_the_rest_is_given(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    config = make_run(1, last=False)
    seen = replace(random_sample("seen", 12), images=[ImageRef(path="a.png")])
    for number, samples in enumerate(([random_sample("text", 12), seen], [replace(seen, seq_id="alone:0")])):
        sync_client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=f"i{number}", samples=samples))})
        sync_client.hincrby(keys.counts, "enqueued", len(samples))
        sync_client.hincrby(keys.counts, "accepted", len(samples))
    sync_client.hset(keys.source, "exhausted", 1)
    with Rollouts(config) as rollouts:
        assert [batch["seq_ids"] for batch in rollouts.batches()] == [ids(1), ["text:0"]]
        rollouts.done()
    now = look(config)
    assert (now.trained, now.dropped, now.reasons, now.complete) == (3, 2, {"dropped:has_images": 2}, True)


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


def ctrl_c(call: Callable[[], Any], when: Callable[[], bool]) -> None:
    """Run it, and interrupt it as Ctrl-C does once it is so."""

    def interrupt() -> None:
        until = time.monotonic() + 20
        while not when() and time.monotonic() < until:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()


def test_what_ctrl_c_kept_from_the_loop_is_given_to_the_next_one(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """The interrupted wait goes on in the session's thread, and takes a batch that nobody sees."""
    config = make_run(1, last=False, batch_wait_s=20.0)
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


def test_a_publish_that_failed_behind_the_ack_makes_no_second_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(2)

    async def ends(*_: Any, **__: Any) -> None:
        raise RuntimeError("cut off")

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(WeightsRegistry, "register", ends)
            with pytest.raises(RuntimeError, match="cut off"):
                rollouts.publish(rollouts.model_path)
        assert look(config).trained == 2
        number = rollouts.publish(rollouts.model_path)
        assert look(config).latest_version == number
        assert manifest_of(config, number).step == 1
        next(batches)
        rollouts.publish(rollouts.model_path)
    lines = read_steps(run_of(config) / "trained.jsonl")
    assert [(line["step"], line["seq_ids"]) for line in lines] == [(1, ids(2)[:2]), (2, ids(2)[2:])]


def test_a_publish_that_was_interrupted_and_called_again_makes_no_second_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request runs to its end though Ctrl-C takes its caller away."""
    config = make_run(2)
    began, go, real = threading.Event(), threading.Event(), Session.commit

    async def slow(self: Session, *args: Any, **options: Any) -> None:
        began.set()
        await asyncio.to_thread(go.wait, 20)
        await real(self, *args, **options)

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "commit", slow)
            ctrl_c(lambda: rollouts.publish(rollouts.model_path), began.is_set)
            go.set()
        rollouts.publish(rollouts.model_path)
        rollouts.done()  # nothing is out, so this is no step either
        next(batches)
        rollouts.done()
    lines = read_steps(run_of(config) / "trained.jsonl")
    assert [(line["step"], line["seq_ids"]) for line in lines] == [(1, ids(2)[:2]), (2, ids(2)[2:])]
    assert look(config).complete


def test_a_version_gives_no_more_credit_than_was_trained_for_it(
    make_run: MakeRun, sync_client: Any, keys: Keys
) -> None:
    """Two versions of one batch in halves, and one of nothing: as many as before may be ahead of the trained ones."""
    config = make_run(2)
    sync_client.hset(keys.source, mapping={"per_version": 2, "staleness": 1})
    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        for seq_ids in ([], ids(1)[:1], ids(1)[1:]):
            rollouts.publish(rollouts.model_path, seq_ids=seq_ids)
        now = look(config)
        assert (now.latest_version, now.trained, now.credit.max_ahead) == (3, 2, 2 * 2 + 2)


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
