"""Which versions landed in the middle of a sequence is counted from the trained samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.consumers.training.step_log import KeptRollouts
from sluice.demo.mid_sequence import count_landed, mid_sequence
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray


@pytest.mark.parametrize(
    ("sequences", "landed", "spans"),
    [
        ([], set(), {}),
        ([[-1, -1, 0, 0, 0], [-1, 1, 1]], set(), {1: 2}),  # new versions, but between the sequences
        ([[-1, 0, 0, 1, 1], [-1, 0, 1, 1, 1]], {1}, {2: 2}),  # one version counts once
        ([[-1, 0, 1, 2, 2]], {1, 2}, {3: 1}),
        ([[0, 2, 2]], {2}, {2: 1}),  # version 1 was skipped
        ([[0, -1, -1, 1]], {1}, {2: 1}),  # tokens that the policy did not sample lie between
        ([[-1, -1]], set(), {0: 1}),
    ],
)
def test_a_version_counts_where_it_follows_an_older_token(
    sequences: list[list[int]], landed: set[int], spans: dict[int, int]
) -> None:
    found = count_landed(sequences)
    assert (found.versions, found.spans) == (landed, spans)


def sample(seq_id: str, versions: list[int]) -> TrainingSample:
    size = len(versions)
    return TrainingSample(
        seq_id=seq_id,
        group_id="g",
        task="exact_answer",
        token_ids=TokenArray([5] * size),
        labels=TokenArray([5] * size),
        weights=FloatArray([1.0] * size),
        segments=Runs.of([0] * size),
        prompt_len=1,
        versions=Runs.of(versions),
    )


def test_it_is_read_from_what_the_trainer_stored(tmp_path: Path) -> None:
    rollouts = KeptRollouts(tmp_path / "rollouts", keep=None)
    rollouts.save(1, [sample("a:0", [-1, 0, 0]), sample("a:1", [-1, 0, 1])])
    rollouts.save(2, [sample("b:0", [-1, 1, 3]), sample("b:1", [-1, 0, 1])])
    found = mid_sequence(tmp_path)
    assert found.versions == {1, 3}
    assert found.spans == {1: 1, 2: 3}
