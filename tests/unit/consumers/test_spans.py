"""Where the answer of a result is."""

from __future__ import annotations

import pytest

from sluice.consumers.tasks.rollout import answer_ids, last_turn
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec

CODEC = tiny_codec("bytes")
END = CODEC.eos_token_ids[0]


@pytest.mark.parametrize(
    ("ids", "mask", "turn", "answer"),
    [
        ([7, 8, END], [], (0, 3), [7, 8]),
        ([7, 8, 9], [], (0, 3), [7, 8, 9]),
        ([], [], (0, 0), []),
        ([7, 8, END], [1, 1, 0], (0, 2), [7, 8]),  # forced by the repeat guard
        ([END], [0], (0, 0), []),  # forced at once
        ([7, END, 5, END, 8, 9, END], [1, 1, 0, 0, 1, 1, 1], (4, 7), [8, 9]),
        ([7, END, 5, 8, 9], [1, 1, 0, 1, 1], (3, 5), [8, 9]),  # ended by its length
        ([7, END, 5, 8, 9, END], [1, 1, 0, 1, 1, 0], (3, 5), [8, 9]),  # of several turns, the last one forced
        ([7, END, 5, END], [1, 1, 0, 1], (3, 4), []),  # an empty answer is not the turn before it
        ([7, END, 5, 5], [1, 1, 0, 0], (0, 2), [7]),
    ],
)
def test_the_answer_is_the_last_sampled_turn(
    ids: list[int], mask: list[int], turn: tuple[int, int], answer: list[int]
) -> None:
    result = sequence_result(
        "g", token_ids=TokenArray(ids), response_mask=Runs.of(mask), versions=Runs.of([0] * len(ids)),
        logprobs=FloatArray([-1.0] * len(ids)),
    )  # fmt: skip
    assert last_turn(result) == turn
    assert answer_ids(result, CODEC) == answer


def test_a_turn_that_came_in_two_runs_is_one() -> None:
    result = sequence_result("g", response_mask=Runs([(1, 1), (1, 2)]))
    assert last_turn(result) == (0, 3)
