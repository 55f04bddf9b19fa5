"""The files of trained samples: whole, the newest ones, and none that a checkpoint does not hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.consumers.training.checkpoint import remove_unfinished_states
from sluice.consumers.training.step_log import KeptRollouts, StepRecords, read_rollouts, read_steps
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.config.types import Config, HistoryConfig, TrainerConfig
from sluice.pipeline.errors import DataError, LeaseLost
from tests.factories import training_sample


def steps(directory: Path) -> list[int]:
    return [step for step, _ in read_rollouts(directory)]


@pytest.mark.parametrize(("keep", "kept"), [(0, []), (1, [4]), (3, [2, 3, 4]), (None, [1, 2, 3, 4])])
def test_the_newest_stay(keep: int | None, kept: list[int], tmp_path: Path) -> None:
    for step in range(1, 5):
        KeptRollouts(tmp_path / "rollouts", keep).save(step, [training_sample(f"s{step}:0")])
    assert steps(tmp_path / "rollouts") == kept


def test_what_is_read_is_what_was_trained(tmp_path: Path) -> None:
    samples = [training_sample("a:0", advantage=0.5), training_sample("b:0", 9)]
    KeptRollouts(tmp_path, None).save(12, samples)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012.msgpack"]
    [(step, batch)] = read_rollouts(tmp_path)
    assert (step, batch.batch_id, batch.samples) == (12, "step-000012", samples)


def test_a_step_that_is_redone_replaces_its_file(tmp_path: Path) -> None:
    kept = KeptRollouts(tmp_path, 2)
    for name in ("first", "second"):
        kept.save(1, [training_sample(f"{name}:0")])
    [(_, batch)] = read_rollouts(tmp_path)
    assert [sample.seq_id for sample in batch.samples] == ["second:0"]


def test_steps_beyond_the_checkpoint_go(tmp_path: Path) -> None:
    kept = KeptRollouts(tmp_path / "rollouts", None)
    kept.cut_after(3)
    for step in (2, 3, 4, 1_000_000):
        kept.save(step, [])
    kept.cut_after(3)
    assert steps(tmp_path / "rollouts") == [2, 3]


def test_numbers_beyond_six_digits_are_the_newest(tmp_path: Path) -> None:
    kept = KeptRollouts(tmp_path, 2)
    for step in (999_999, 1_000_000, 1_000_001):
        kept.save(step, [])
    (tmp_path / "step-notes.msgpack").write_text("not one of ours")
    assert steps(tmp_path) == [1_000_000, 1_000_001]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-000003.msgpack").write_bytes(b"\x07")
    with pytest.raises(DataError, match=r"step-000003.msgpack: cannot be read .*delete it"):
        list(read_rollouts(tmp_path))


def test_a_trainer_that_lost_its_role_leaves_the_file_of_its_successor(tmp_path: Path) -> None:
    def lost() -> None:
        raise LeaseLost("took over this role")

    config = Config(
        run_dir=str(tmp_path), history=HistoryConfig(enabled=False), trainer=TrainerConfig(keep_rollouts=None)
    )
    records = StepRecords(cast(Any, SimpleNamespace(config=config)), Trackers(config), tmp_path)
    records.write(1, 0, [training_sample("a:0")], {})
    with pytest.raises(LeaseLost):
        records.write(2, 1, [training_sample("late:0")], {}, lost)
    assert steps(tmp_path / "rollouts") == [1]
    records.write(2, 1, [training_sample("b:0")], {})
    with pytest.raises(LeaseLost):  # another attempt would cut what is there
        records.write(2, 1, [training_sample("late:0")], {}, lost)
    found = {step: batch.samples[0].seq_id for step, batch in read_rollouts(tmp_path / "rollouts")}
    assert found == {1: "a:0", 2: "b:0"}
    assert [each["step"] for each in read_steps(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_successor_removes_what_is_left_to_rename(tmp_path: Path) -> None:
    def superseded() -> None:
        remove_unfinished_states(tmp_path)

    with pytest.raises(FileNotFoundError):
        KeptRollouts(tmp_path / "rollouts", None).save(1, [training_sample("a:0")], superseded)
    assert steps(tmp_path / "rollouts") == []
