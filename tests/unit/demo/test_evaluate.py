from __future__ import annotations

import pytest

from sluice.demo.digits.data import answer_text
from sluice.demo.digits.evaluate import detection_f1, read_objects
from sluice.demo.digits.scenes import scenes

TRUTH = [{"desc": "seven", "bbox_2d": [0, 0, 400, 400]}, {"desc": "two", "bbox_2d": [500, 0, 900, 400]}]


def test_the_truth_scores_one() -> None:
    truths = [scene.objects for scene in scenes("heldout", 20, seed=0)]
    texts = [answer_text(objects) + "<|im_end|>" for objects in truths]
    assert detection_f1(texts, truths) == {"f1": 1.0, "precision": 1.0, "recall": 1.0}


@pytest.mark.parametrize(
    ("predicted", "precision", "recall"),
    [
        ([{**TRUTH[0], "desc": "one"}, TRUTH[1]], 0.5, 0.5),
        ([{**TRUTH[0], "bbox_2d": [300, 300, 700, 700]}, TRUTH[1]], 0.5, 0.5),
        ([TRUTH[0], TRUTH[0]], 0.5, 0.5),
        ([TRUTH[1]], 1.0, 0.5),
        ([{**TRUTH[0], "bbox_2d": [400, 400, 0, 0]}], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_wrong_digits_boxes_and_repeats_cost(predicted: list, precision: float, recall: float) -> None:
    score = detection_f1([answer_text(predicted)], [TRUTH])
    assert (score["precision"], score["recall"]) == (precision, recall)


def test_a_broken_tail_keeps_the_complete_objects() -> None:
    text = answer_text(TRUTH)
    assert read_objects(text) == TRUTH
    assert read_objects(text[:-20]) == TRUTH[:1]
    assert read_objects("nonsense") == []


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        detection_f1(["{}"], [])
