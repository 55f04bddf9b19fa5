"""The files of trained samples: whole, the newest ones, and none that a checkpoint does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.consumers.training.step_log import KeptRollouts, read_rollouts
from sluice.pipeline.errors import DataError
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
