"""Parse and match for display, and the boxes that it draws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.consumers.dashboard.outcome import Answer, Detection, Failed, Other, Pair, outcome
from sluice.consumers.dashboard.picture import WIDTH, drawing
from sluice.consumers.tasks.registry import TASKS
from sluice.consumers.tasks.task import Matched, Parsed, Task, TaskContext
from tests.detection_rollouts import BOXES, answer, context, obj, rollout
from tests.tiny_tokenizer import tiny_codec

TRUTH = [obj("seven", 0, 0, 500, 500), obj("nine", 600, 600, 999, 999)]


def detect(text: str, truth: Any = TRUTH) -> Any:
    codec = tiny_codec("words")
    return outcome(rollout(codec.encode(text), truth=truth), TASKS["detection"], context(codec))


def test_every_object_and_every_truth_has_one_fate() -> None:
    said = [obj("seven", 0, 0, 500, 400), obj("zero", 700, 0, 900, 100), {"desc": "eight", "bbox_2d": [9, 9, 1, 1]}]
    made = detect(answer(said, tiny_codec("words"), closed=False))
    assert isinstance(made, Detection)
    assert made.truncated
    matched, false, dropped, missed = made.pairs
    assert (matched.fate, matched.predicted, matched.truth, matched.iou) == (
        "matched", "seven", "seven", pytest.approx(0.8),
    )  # fmt: skip
    assert (false.fate, false.truth_box) == ("false positive", None)
    assert (dropped.fate, dropped.reason, dropped.box) == ("dropped", "bbox_invalid", None)
    assert (missed.fate, missed.truth, missed.box) == ("missed", "nine", None)
    assert [made.count(fate) for fate in ("matched", "false positive", "dropped", "missed")] == [1, 1, 1, 1]


def test_an_exact_answer_and_its_truth() -> None:
    codec = tiny_codec("words")
    ctx = context(codec, task="exact_answer")
    truth = {"answer": "4", "pattern": r"= (\d+)"}
    result = rollout(codec.encode("2 + 2 = 5"), truth=truth)
    assert outcome(result, TASKS["exact_answer"], ctx) == Answer("5", "4", False, r"= (\d+)")
    assert outcome(rollout(codec.encode("5"), reward=1.0), TASKS["exact_answer"], ctx) == Answer("5", None, True)


@pytest.mark.parametrize("truth", [None, "no list", [{"desc": "x"}], [obj("seven", 9, 9, 1, 1)]])
def test_a_truth_that_cannot_be_used_is_a_message(truth: Any) -> None:
    made = detect("{}", truth)
    assert isinstance(made, Failed)
    assert "truth" in made.message


def test_a_task_that_fails_or_is_of_another_kind() -> None:
    def parse(result: Any, ctx: TaskContext) -> Parsed:
        return Parsed(result, object(), 0, True, {"own/parsed": 1.0})

    def match(parsed: Parsed, truth: Any, ctx: TaskContext) -> Matched:
        return Matched(parsed, None, {"own/matched": 2.0}) if truth else [][1]

    task = Task("own", parse, match, TASKS["detection"].target)
    ctx = context(tiny_codec())
    assert outcome(rollout([1], truth=1), task, ctx) == Other(True, {"own/parsed": 1.0, "own/matched": 2.0})
    failed = outcome(rollout([1]), task, ctx)
    assert isinstance(failed, Failed)
    assert "own" in failed.message
    assert "IndexError" in failed.message


@given(st.lists(st.tuples(BOXES, BOXES, st.text(max_size=60)), max_size=8), st.integers(1, 5000), st.integers(1, 5000))
def test_shapes_and_labels_stay_inside(boxes: Any, width: int, height: int) -> None:
    pairs = [
        Pair(number, "matched", desc, tuple(box), desc, tuple(true), 0.5)
        for number, (box, true, desc) in enumerate(boxes, 1)
    ]
    drawn = drawing(pairs, (width, height))
    assert len(drawn.shapes) == 2 * len(pairs)
    assert drawn.width == WIDTH
    for shape in drawn.shapes:
        assert 0 <= shape.x <= shape.x + shape.width <= WIDTH + 1.2
        assert 0 <= shape.y <= shape.y + shape.height <= drawn.height + 1.2
        assert 0 <= shape.label_x <= WIDTH
        assert 0 < shape.label_y <= drawn.height


def test_coordinates_are_those_of_the_picture() -> None:
    missed = Pair(1, "missed", truth="nine\u202e", truth_box=(0, 999, 999, 999))
    drawn = drawing([Pair(2, "false positive", "seven", (0, 0, 999, 500)), missed], (200, 100))
    first, second = drawn.shapes
    assert (first.x, first.y, first.width, first.height) == (0, 0, WIDTH, pytest.approx(WIDTH / 2 * 500 / 999, abs=0.1))
    assert (first.css, first.label) == ("prediction false-positive", "2 ✗ seven")
    assert second.css == "truth missed"
    assert "\u202e" not in second.label + second.title
    assert drawn.height == WIDTH / 2
    assert drawing([]).height == WIDTH


def test_too_many_boxes_are_counted_not_drawn() -> None:
    drawn = drawing([Pair(at, "false positive", "x", (0, 0, 9, 9)) for at in range(500)])
    assert (len(drawn.shapes), drawn.hidden) == (400, 100)


def test_labels_that_would_overlap_go_apart() -> None:
    pairs = [Pair(at, "false positive", "seven", (100, 300, 200, 400)) for at in range(3)]
    rows = [shape.label_y for shape in drawing(pairs).shapes]
    assert [second - first for first, second in itertools.pairwise(rows)] == [18, 18]
    apart = drawing([pairs[0], Pair(9, "false positive", "nine", (500, 300, 600, 400))]).shapes
    assert apart[0].label_y == apart[1].label_y
