"""Packed rows: nothing lost, nothing seen twice, no sample sees another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.consumers.pack import (
    IGNORED,
    ce_token_count,
    ce_weight_sum,
    ce_weights,
    collate,
    empty_rows,
    pack_rows,
    shares_of,
)
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray


def sample(*ids: int, weights: list[float] | None = None) -> TrainingSample:
    return TrainingSample(
        seq_id="s",
        group_id="g",
        task="t",
        token_ids=TokenArray(ids),
        labels=TokenArray(100 + token for token in ids),
        weights=FloatArray(weights or [1.0] * len(ids)),
        segments=Runs.of([5] * len(ids)),
        prompt_len=0,
    )


@given(st.lists(st.integers(0, 120), max_size=60), st.integers(1, 100))
def test_every_index_once_and_the_budget_holds(lengths: list[int], budget: int) -> None:
    rows = pack_rows(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= budget or len(row) == 1
    assert rows == pack_rows(lengths, budget)
    full = sum(sum(lengths[index] for index in row) * 2 > budget for row in rows)
    assert full >= len(rows) - 1, "two rows that are both half empty would have been one"


def test_best_fit_takes_the_fullest_row_that_has_room() -> None:
    assert pack_rows([6, 5, 4, 3, 12], 10) == [[4], [0, 2], [1, 3]]
    assert pack_rows([], 10) == []


def test_layout_shapes_and_dtypes() -> None:
    samples = [sample(1, 2, 3, weights=[1.0, 0.0, 0.5]), sample(4, 5), sample(6, 7, 8, 9)]
    packed = collate(samples, [[0, 1], [2]], pad_id=77)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 77]]
    assert packed.labels.tolist() == [
        [IGNORED, IGNORED, 103, IGNORED, 105],
        [IGNORED, 107, 108, 109, IGNORED],
    ]
    assert packed.weights.tolist() == [[0, 0, 0.5, 0, 1], [0, 1, 1, 1, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert packed.segment_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert [tuple(place) for place in packed.places] == [(0, 0, 0, 3), (1, 0, 3, 2), (2, 1, 0, 4)]
    arrays = (packed.input_ids, packed.labels, packed.weights, packed.position_ids, packed.segment_ids)
    assert [array.dtype.name for array in arrays] == ["int64", "int64", "float32", "int64", "int32"]
    assert list(samples[0].weights) == [1.0, 0.0, 0.5], "the sample itself is not changed"


def test_no_rows_and_an_empty_sample() -> None:
    assert collate([], [], 0).input_ids.shape == (0, 0)
    assert collate([sample(), sample(3)], [[0, 1]], 0).input_ids.tolist() == [[3]]


def test_shares_have_about_equal_sums_and_every_sample_once() -> None:
    costs = [9, 33, 5, 61, 12, 27, 40, 7]
    for ranks in (1, 2, 3, 12):
        shares = shares_of(costs, ranks)
        assert sorted(index for share in shares for index in share) == list(range(len(costs)))
        sums = [sum(costs[index] for index in share) for share in shares]
        assert max(sums) <= max(max(costs), sum(costs) / ranks + max(costs) / 2)
    assert shares_of(costs, 1) == [list(range(len(costs)))]
    assert shares_of([], 2) == [[], []]


def test_a_label_that_is_ignored_has_no_weight_whatever_its_target_says() -> None:
    """As transformers has it: labels of -100 on what isn't taught, and weights of 1 everywhere."""
    one = replace(sample(7, 8, 9, 10), labels=TokenArray([IGNORED, 108, IGNORED, 110]))
    assert ce_weights(one).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert (ce_weight_sum([one, one]), ce_token_count([one])) == (4.0, 2)


def test_empty_rows_train_nothing() -> None:
    rows = empty_rows(7)
    assert rows.input_ids.tolist() == [[7, 7]]
    assert (rows.labels == IGNORED).all()
    assert not rows.weights.any()
    assert not rows.places
