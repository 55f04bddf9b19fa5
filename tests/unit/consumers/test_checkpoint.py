"""Checkpoints are whole or absent and give back the very same run; the step log agrees with them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sluice.consumers.training import checkpoint
from sluice.consumers.training.checkpoint import TrainerState
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.step_log import StepLog, read_steps
from sluice.pipeline.errors import ModelError
from sluice.pipeline.wire.messages import DeadLetter
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


def steps(step: TrainStep, first: int, last: int) -> None:
    """Steps on data that the random state picks, as dropout would."""
    for number in range(first, last + 1):
        seed = int(torch.randint(0, 1 << 30, ()))
        step.run([random_sample("a", 20, seed), random_sample("b", 11, seed)], number)


def save(root: Path, step: TrainStep, source: Path, number: int = 1) -> Path:
    state = TrainerState(step=number, version=number, unacked=[("1-0", 2)], samples=4)
    return checkpoint.save(root, step.model, step.optimizer, state, source)


def test_a_resumed_run_has_bit_identical_weights(tmp_path: Path, source: Path) -> None:
    options: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1}
    straight = train_step(source, **options)
    steps(straight, 1, 6)
    first = train_step(source, **options)
    steps(first, 1, 3)
    directory = save(tmp_path, first, source, 3)
    torch.manual_seed(99)
    resumed = train_step(source, **options)
    state = checkpoint.load(directory, resumed.model, resumed.optimizer)
    assert (state.step, state.version, state.unacked) == (3, 3, [("1-0", 2)])
    assert same(weights_of(first), weights_of(resumed))
    steps(resumed, 4, 6)
    assert same(weights_of(straight), weights_of(resumed))


def test_a_checkpoint_before_any_step_loads(tmp_path: Path, source: Path) -> None:
    step = train_step(source)
    directory = save(tmp_path, step, source, 0)
    assert checkpoint.load(directory, step.model, step.optimizer).step == 0


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/state.json", "trainer/optimizer.safetensors"])
@pytest.mark.parametrize("how", ["cut", "junk", "empty", "gone"])
def test_a_damaged_checkpoint_is_a_model_error_that_names_it(tmp_path: Path, source: Path, name: str, how: str) -> None:
    step = train_step(source)
    file = save(tmp_path, step, source) / name
    raw = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes({"cut": raw[: len(raw) // 2], "junk": b"\x07" * 300, "empty": b""}[how])
    with pytest.raises(ModelError, match="step-000001: damaged checkpoint"):
        checkpoint.load(tmp_path / "step-000001", step.model, step.optimizer)


def test_no_changed_byte_is_loaded(tmp_path: Path, source: Path) -> None:
    """The format checks its header alone: most of these would load as other numbers."""
    step = train_step(source)
    old, new = save(tmp_path, step, source, 1), save(tmp_path, step, source, 2)
    files = [file for file in new.rglob("*") if file.is_file()]
    randomly = random.Random(7)
    for file in files:
        raw = file.read_bytes()
        for at in randomly.sample(range(len(raw)), min(6, len(raw))):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << randomly.randrange(8)]) + raw[at + 1 :])
            assert checkpoint.newest(tmp_path) == old, (file, at)
            (tmp_path / "damaged-step-000002").rename(new)
        file.write_bytes(raw[:-1])
        assert checkpoint.newest(tmp_path) == old, file
        (tmp_path / "damaged-step-000002").rename(new)
        file.write_bytes(raw)
        assert checkpoint.newest(tmp_path) == new


def test_a_checkpoint_of_another_model_is_a_model_error(tmp_path: Path, source: Path) -> None:
    other = save_tiny_model(tmp_path / "other", groups=1)
    directory = save(tmp_path / "c", train_step(other), other)
    step = train_step(source)
    with pytest.raises(ModelError):
        checkpoint.load(directory, step.model, step.optimizer)


def test_a_checkpoint_from_copies_is_of_its_own_step(tmp_path: Path, source: Path) -> None:
    step = train_step(source, learning_rate=1e-2)
    steps(step, 1, 2)
    expected = save(tmp_path / "at once", step, source, 2)
    copies = checkpoint.Copies.of(step.model, step.optimizer, with_model=True, keep=True)
    begun = checkpoint.Unfinished(tmp_path, 2, step.model, step.optimizer, source, copies=copies)
    steps(step, 3, 4)
    directory = begun.complete(TrainerState(step=2, version=2, unacked=[("1-0", 2)], samples=4))
    for file in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/digests.json", "config.json"):
        assert (directory / file).read_bytes() == (expected / file).read_bytes(), file


def test_an_interrupted_save_leaves_the_old_one(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_step(source)
    old = save(tmp_path, step, source, 1)

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fsync_tree", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, step, source, 2)
    assert checkpoint.newest(tmp_path) == old
    assert checkpoint.load(old, step.model, step.optimizer).step == 1
    assert checkpoint.newest(save(tmp_path, step, source, 2).parent) == tmp_path / "step-000002"


def test_the_newest_is_the_one_of_the_highest_number(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for number in (3, 999_999, 1_000_000):
        trainer = tmp_path / f"step-{number:06d}" / "trainer"
        trainer.mkdir(parents=True)
        (trainer / "state.json").write_text("{}")  # of an older release: without digests
    assert checkpoint.newest(tmp_path) == tmp_path / "step-1000000"
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_a_checkpoint_is_a_model_directory(tmp_path: Path, source: Path) -> None:
    directory = save(tmp_path, train_step(source), source)
    assert same(weights_of(train_step(directory)), weights_of(train_step(source)))
    assert (directory / "tokenizer.json").exists()


def test_a_models_odd_generation_config_stops_no_checkpoint(tmp_path: Path, source: Path) -> None:
    """transformers loads it with a warning, and refuses to save it."""
    own = shutil.copytree(source, tmp_path / "own")
    odd = '{"temperature": 0.6, "top_p": 0.9, "do_sample": false, "num_beams": 1, "early_stopping": true}'
    (own / "generation_config.json").write_text(odd)
    directory = save(tmp_path / "c", train_step(own), own)
    assert (directory / "generation_config.json").read_text() == odd


def test_remembered_ids_are_bounded() -> None:
    state = TrainerState()
    for number in range(20):
        state.remember([f"{number}:{index}" for index in range(1000)])
    assert len(state.recent) == 8192
    assert state.recent[-1] == "19:999"


def test_what_was_dropped_is_part_of_a_batch_and_survives_a_restart(tmp_path: Path, source: Path) -> None:
    step, state = train_step(source), TrainerState(step=1)
    letters = [DeadLetter(seq_id="a:0", reason="stale", state="dropped", detail="old", at=1.5)]
    state.take([("1-0", 2, letters), ("2-0", 2, [])])
    state.remember_dropped(letters)
    directory = checkpoint.save(tmp_path, step.model, step.optimizer, state, source)
    again = checkpoint.load(directory, step.model, step.optimizer)
    assert (again.unacked, again.unacked_drops) == ([("1-0", 2), ("2-0", 2)], {"1-0": letters})
    assert again.dropped == {"a:0": "stale"}


def test_a_state_of_an_earlier_release_loads(tmp_path: Path, source: Path) -> None:
    step = train_step(source)
    directory = save(tmp_path, step, source)
    (directory / "trainer/state.json").write_text('{"step": 1, "version": 1, "unacked": [["1-0", 2]], "recent": ["a"]}')
    state = checkpoint.load(directory, step.model, step.optimizer)
    assert (state.unacked, state.unacked_drops, state.dropped) == ([("1-0", 2)], {}, {})


def test_remembered_drops_are_bounded() -> None:
    state = TrainerState()
    for number in range(20):
        state.remember_dropped(DeadLetter(seq_id=f"{number}:{index}", reason="stale") for index in range(1000))
    assert len(state.dropped) == 8192
    assert list(state.dropped)[-1] == "19:999"


def test_the_step_log_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log" / "steps.jsonl"
    log = StepLog(path)
    log.cut_after(3)
    assert read_steps(path) == []
    for number in range(1, 6):
        log.append(number, loss=number / 2)
    with path.open("ab") as stream:
        stream.write(b'{"step": 2, "lo')  # killed while it wrote
    log.cut_after(3)
    assert [line["step"] for line in read_steps(path)] == [1, 2, 3]
    log.append(4, loss=9.0)
    assert read_steps(path)[-1] == {"step": 4, "loss": 9.0}


def test_junk_in_the_step_log_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'junk\n[]\n3\n{"step": "x"}\n{"no": 1}\n{"step":1}\n')
    StepLog(path).cut_after(5)
    assert read_steps(path) == [{"step": 1}]


def test_a_save_replaces_no_checkpoint_of_the_same_step(tmp_path: Path, source: Path) -> None:
    """It is another trainer's, which has taken over."""
    step = train_step(source)
    first = save(tmp_path, step, source)
    with pytest.raises(OSError, match="not empty"):
        save(tmp_path, step, source)
    assert checkpoint.newest(tmp_path) == first
    checkpoint.prune(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [first]


def test_the_runs_totals_are_summed_over_steps_and_go_on_after_a_restart(tmp_path: Path, source: Path) -> None:
    step, state = train_step(source), TrainerState(step=2)
    ended, saved = (f"rollout/repeat_terminate_{name}" for name in ("triggered_sequences", "tokens_saved"))
    state.count({ended: 2.0, saved: 300.0, "train/loss": 1.0})
    assert state.count({"train/loss": 1.0}) == {f"total/{ended}": 2.0, f"total/{saved}": 300.0}
    directory = checkpoint.save(tmp_path, step.model, step.optimizer, state, source)
    again = checkpoint.load(directory, step.model, step.optimizer)
    assert again.count({ended: 1.0, saved: 7.0}) == {f"total/{ended}": 3.0, f"total/{saved}": 307.0}


def test_a_line_that_is_torn_or_no_text_costs_that_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\xff\xfe\n{"st\n' + b"[" * 100_000 + b'\n{"step": ' + b"9" * 30 + b'}\n{"step": 2}\n{"ste'
    )
    assert read_steps(path) == [{"step": 1}, {"step": 2}]
    StepLog(path).cut_after(2)
    assert path.read_bytes().endswith(b'}\n{"step": 2}\n'), "the torn one is gone, the others keep their places"
    assert read_steps(path) == [{"step": 1}, {"step": 2}]


def test_weights_in_the_parts_of_ranks_are_no_model_directory(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints/step-000001/trainer"
    directory.mkdir(parents=True)
    state = checkpoint.TrainerState(step=1, version_step=0)
    (directory / "state.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(ModelError, match="in the parts of several ranks"):
        checkpoint.model_of(tmp_path)
    (directory.parent / "model.safetensors").touch()
    assert checkpoint.model_of(tmp_path) == directory.parent
