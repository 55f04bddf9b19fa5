"""The assignment against every possible assignment, and the truths that are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.tasks.detection.geometry import Box, iou_matrix
from sluice.consumers.tasks.detection.match import assign, candidates
from sluice.pipeline.config.types import RolloutMatchingConfig
from sluice.pipeline.errors import TaskError
from tests.detection_rollouts import answer, context, obj, run
from tests.tiny_tokenizer import tiny_codec

_SIDE = st.integers(0, 12)
SMALL_BOXES = st.tuples(_SIDE, _SIDE, _SIDE, _SIDE).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3]))
OPTIONS = st.builds(
    RolloutMatchingConfig,
    match_top_k=st.integers(1, 4),
    iou_gate=st.sampled_from([0.0, 0.1, 0.3, 0.7]),
    fp_cost=st.sampled_from([0.2, 1.0]),
    fn_cost=st.sampled_from([0.2, 1.0]),
)


def best_cost(predictions: list[Box], truths: list[Box], options: RolloutMatchingConfig) -> float:
    """By trying everything: each prediction takes one truth that it may take, or none."""
    iou = iou_matrix(predictions, truths)
    best = float("inf")
    for choice in itertools.product([None, *range(len(truths))], repeat=len(predictions)):
        taken = [pick for pick in choice if pick is not None]
        if len(set(taken)) < len(taken):
            continue
        cost = options.fp_cost * choice.count(None) + options.fn_cost * (len(truths) - len(taken))
        for row, pick in enumerate(choice):
            if pick is None:
                continue
            better = sum(other > iou[row, pick] for other in iou[row])
            allowed = better < options.match_top_k and iou[row, pick] >= options.iou_gate
            cost += 1 - iou[row, pick] if allowed else float("inf")
        best = min(best, cost)
    return best


@given(st.lists(SMALL_BOXES, max_size=4), st.lists(SMALL_BOXES, max_size=4), OPTIONS)
@settings(max_examples=200, deadline=None)
def test_no_assignment_is_cheaper(predictions: list[Box], truths: list[Box], options: RolloutMatchingConfig) -> None:
    iou = iou_matrix(predictions, truths)
    if any(len(set(row)) < len(row) for row in iou.tolist()):
        options = RolloutMatchingConfig(
            iou_gate=options.iou_gate, fp_cost=options.fp_cost, fn_cost=options.fn_cost
        )  # ties at the top-k border have several right answers
    pairs, ious, _ = assign(predictions, truths, options)
    cost = sum(1 - value for value in ious)
    cost += options.fp_cost * (len(predictions) - len(pairs)) + options.fn_cost * (len(truths) - len(pairs))
    assert cost == pytest.approx(best_cost(predictions, truths, options))
    assert all(value >= options.iou_gate for value in ious)
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)


def test_iou_by_hand_and_without_area() -> None:
    boxes: list[Box] = [(0, 0, 10, 10), (5, 0, 15, 10), (3, 3, 3, 9), (3, 3, 3, 3)]
    iou = iou_matrix(boxes, boxes)
    assert iou[0, 1] == pytest.approx(50 / 150)
    assert np.diag(iou).tolist() == [1, 1, 1, 1]
    assert iou[2, 3] == iou[0, 2] == 0


def test_without_overlap_the_nearest_truths_are_candidates() -> None:
    iou = np.array([[0.0, 0.0, 0.0], [0.2, 0.5, 0.0]])
    distance = np.array([[9.0, 1.0, 5.0], [1.0, 9.0, 2.0]])
    assert candidates(iou, distance, 2).tolist() == [[False, True, True], [True, True, False]]


def test_counters_of_one_sample() -> None:
    codec = tiny_codec()
    truths = [obj("seven", 0, 0, 100, 100), obj("nine", 500, 500, 600, 600)]
    written = [obj("seven", 0, 0, 100, 90), obj("nine", 0, 0, 40, 40)]
    matched, sample = run(answer(written, codec), truths, context(codec))
    got = {key.removeprefix("rollout/"): value for key, value in matched.metrics.items()}
    assert got == pytest.approx(
        {
            "gt_objects": 2,
            "matched_for_supervision": 1,
            "fn": 1,
            "fp": 1,
            "gating_rejections": 3,
            "matched_iou_sum": 0.9,
        }
    )
    assert sample.metrics["rollout/fn_appended"] == 1


BAD_TRUTHS = [
    (None, "give a list"),
    ({"desc": "a"}, "give a list"),
    (["a"], r"truth\[0\]"),
    ([obj("a", 1, 2, 3, 4) | {"more": 1}], "exactly the keys"),
    ([obj("a", 1, 2, 3, 4), obj(" ", 1, 2, 3, 4)], r"truth\[1\].desc"),
    ([obj("\ud800", 1, 2, 3, 4)], "surrogate"),
    ([obj("a<|im_end|>", 1, 2, 3, 4)], "terminator"),
    ([obj("a", 3, 2, 1, 4)], "x2 >= x1"),
    ([obj("a", 1, 2, 3, 1000)], "0-999"),
    ([{"desc": "a", "bbox_2d": [True, 2, 3, 4]}], "integers"),
]


@pytest.mark.parametrize(("truth", "says"), BAD_TRUTHS)
def test_a_bad_truth_says_where_and_what_to_do(truth: Any, says: str) -> None:
    codec = tiny_codec()
    with pytest.raises(TaskError, match=says) as caught:
        run("{}", truth, context(codec))
    assert "job:0" in str(caught.value)


BOTH = "exactly the keys desc and bbox_2d or poly"
BAD_LISTED: list[tuple[Any, str]] = [
    ([{"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": [1, 2, 3, 4, 5, 6]}], BOTH),
    ([{"desc": "a"}], BOTH),
    ([{"desc": "a", "poly": [1, 2, 3, 4]}], "at least 3 points"),
    ([{"desc": "a", "poly": [[1, 2], [3, 4], [5]]}], "at least 3 points"),
    ([{"desc": "a", "poly": [1, 2, 3, 4, 5, 1000]}], "0-999"),
    ("text", r"give a list of \{desc, bbox_2d\} or \{desc, poly\}"),
]


@pytest.mark.parametrize(("truth", "says"), BAD_LISTED)
def test_a_bad_truth_of_the_list_grammar_says_what_to_do(truth: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        run('{"objects": []}', truth, context(tiny_codec(), grammar="objects"))


def test_a_polygon_is_no_truth_of_the_older_grammar() -> None:
    with pytest.raises(TaskError, match="exactly the keys desc and bbox_2d"):
        run("{}", [{"desc": "a", "poly": [1, 2, 3, 4, 5, 6]}], context(tiny_codec()))
