"""Each publish of a loop is one step, wherever it is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from sluice.consumers.training import handoff
from sluice.consumers.training.checkpoint import TrainerState, write_state
from sluice.consumers.training.handoff import Rollouts
from sluice.consumers.training.session import Session
from sluice.consumers.training.step_log import StepRecords, read_steps
from sluice.pipeline.broker import connection
from sluice.pipeline.errors import LeaseLost, ModelError
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.carriers import carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.store import Store
from sluice.pipeline.wire.keys import Keys
from tests.training_loops import MakeRun, ctrl_c, ids, load, look, manifest_of, run_of, trained


class _Adapter:
    def save_pretrained(self, directory: Path) -> None:
        save_file({"linear.weight": torch.zeros(1)}, directory / "adapter_model.safetensors")


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


@pytest.mark.parametrize("transport", ["store", "delta"])
def test_a_version_whose_upload_was_cut_off_is_in_the_store_when_it_is_registered(
    make_run: MakeRun, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(1)
    there = {"transport": transport, "store_url": f"file://{tmp_path}/store", "cache_dir": str(tmp_path / "cache")}
    config = replace(config, weights=replace(config.weights, **there))

    def ends(*_: Any) -> None:
        raise RuntimeError("killed")

    with Rollouts(config) as rollouts:
        model = load(rollouts.model_path)
        next(rollouts.batches())
        with monkeypatch.context() as patch:
            patch.setattr(Store, "_upload", ends)
            with pytest.raises(RuntimeError, match="killed"):
                rollouts.publish(model)
    with Rollouts(config) as rollouts:
        assert (rollouts.version, look(config).latest_version) == (1, 1)
    worker = carrier_of(config)
    versions.check_files(manifest_of(config, 1), worker.fetch(manifest_of(config, 1)))
    worker.close()


@pytest.mark.parametrize("at_work", ["writing tensors", "naming the files"])
def test_a_loop_whose_successor_removed_its_files_says_that_it_was_replaced(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, at_work: str
) -> None:
    """It was paused: what it finds missing is not the cause."""
    config = make_run(1)

    def resumes(directory: Path, state: TrainerState) -> None:
        write_state(directory, state)
        role = f"{Keys(config.run).owner}trainer"
        with connection.connect_sync(config.broker) as client:
            client.mset(dict.fromkeys((role, f"{role}:last"), "successor"))
        shutil.rmtree(directory)
        if at_work == "writing tensors":
            save_file({"moment": torch.zeros(1)}, directory / "optimizer.safetensors")

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(LeaseLost, match="took over this role"))  # at its end too
        rollouts = stack.enter_context(Rollouts(config))
        next(rollouts.batches())
        monkeypatch.setattr(handoff, "write_state", resumes)
        rollouts.publish(rollouts.model_path)


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


def test_weights_that_are_not_finite_finish_nothing(make_run: MakeRun) -> None:
    config = make_run(1)
    with Rollouts(config) as rollouts:
        model = load(rollouts.model_path)
        rollouts.prove(model)
        next(rollouts.batches())
        whole = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        with pytest.raises(ModelError, match="score is nan"):
            rollouts.publish(model)
        assert (look(config).trained, look(config).latest_version) == (0, 0)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), whole, strict=True):
                parameter.copy_(value)
        assert rollouts.publish(model) == 1
    assert trained(config) == ids(1)


@pytest.mark.parametrize(("place", "name", "acked"), [(versions, "write_version", 0), (WeightsRegistry, "register", 2)])
def test_a_publish_that_failed_is_tried_again_as_the_same_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, acked: int
) -> None:
    """Before its ack, and behind it."""
    config = make_run(2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with Rollouts(config) as rollouts:
        batches = rollouts.batches()
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(OSError, match="no space"):
                rollouts.publish(rollouts.model_path)
        assert look(config).trained == acked
        number = rollouts.publish(rollouts.model_path)
        assert number == 1 or acked
        assert (look(config).trained, look(config).latest_version) == (2, number)
        assert manifest_of(config, number).step == 1
        next(batches)
        rollouts.publish(rollouts.model_path)
    lines = read_steps(run_of(config) / "trained.jsonl")
    assert [(line["step"], line["seq_ids"]) for line in lines] == [(1, ids(2)[:2]), (2, ids(2)[2:])]
    assert look(config).complete


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
