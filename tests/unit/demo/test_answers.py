"""Which versions' answers the report shows, and that a cut-off file does not spoil them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice.demo.answers import Answers, AnswerView, keep, read, shortened, through_time
from sluice.demo.arithmetic.task import TASK as ARITHMETIC
from sluice.demo.digits.scenes import SceneObject
from sluice.demo.digits.task import TASK as DIGITS
from sluice.demo.tools.evaluate import Conversation
from sluice.demo.tools.task import TASK as TOOLS


def of(version: int, text: str = "x") -> Answers:
    return Answers(version, 100.0 + version, [AnswerView([text], "right", "good")])


def shown(versions: range | list[int], last: int) -> list[tuple[str, int]]:
    return [(column.title, column.answers.version) for column in through_time([of(one) for one in versions], last)]


def test_five_versions_are_shown_at_quarters_of_the_run() -> None:
    expected = [("warm start", 0), ("a quarter", 15), ("half", 30), ("three quarters", 45), ("last", 60)]
    assert shown(range(61), 60) == expected
    assert shown([0, 13, 16, 29, 46, 60], 60) == [
        ("warm start", 0), ("a quarter", 16), ("half", 29), ("three quarters", 46), ("last", 60),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "last", "expected"),
    [
        ([], 60, []),
        ([0], 0, [("warm start", 0)]),
        ([0, 60], 60, [("warm start", 0), ("last", 60)]),
        ([0, 31, 60], 60, [("warm start", 0), ("half", 31), ("last", 60)]),
        ([3, 20], 60, [("first scored", 3), ("last scored", 20)]),
        ([0, 1, 2, 3], 3, [("warm start", 0), ("a quarter", 1), ("three quarters", 2), ("last", 3)]),
    ],
)
def test_fewer_versions_are_named_for_what_they_are(
    versions: list[int], last: int, expected: list[tuple[str, int]]
) -> None:
    assert shown(versions, last) == expected


def test_answers_come_back_by_version_and_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert read(path) == []
    for one in (of(2), of(0, "<&>\n"), of(2, "again")):
        keep(path, one)
    with path.open("ab") as stream:
        stream.write(b'{"version": 3, "at": 1.0, "vie')
    assert read(path) == [of(0, "<&>\n"), of(2, "again")]


def test_a_long_answer_is_cut_and_says_so() -> None:
    assert shortened("a" * 400) == "a" * 400
    assert shortened("a" * 403).endswith("a… (3 more characters)")


def test_a_scene_is_scored_by_the_rule_of_the_held_out_f1() -> None:
    scene = DIGITS.heldout(1, 77)[0]
    problem = DIGITS.problem_view(scene)
    assert problem.picture is not None
    assert problem.picture.url.startswith("data:image/png;base64,")
    right = DIGITS.answer_view(scene, truth_text(scene.objects))
    wrong = DIGITS.answer_view(scene, '{"object_1": {"desc": "zero", "bbox_2d": [900, 900, 1, 1]}}')
    many = DIGITS.answer_view(scene, truth_text([*scene.objects, scene.objects[0]]))
    assert (right.state, right.boxes) == ("good", problem.picture.boxes)
    assert (wrong.state, wrong.boxes[0].width, wrong.boxes[0].height) == ("bad", 0.0, 0.0)
    assert many.state == "warn"
    assert f"{len(scene.objects) + 1} predicted" in many.score
    assert DIGITS.answer_view(scene, "").state == "bad"


def truth_text(objects: Sequence[SceneObject]) -> str:
    """The answer that names these objects."""
    return json.dumps({f"object_{number}": one for number, one in enumerate(objects, start=1)})


def test_sums_are_scored_by_their_last_number() -> None:
    problem = ARITHMETIC.heldout(1, 77)[0]
    right, wrong = ARITHMETIC.answer_view(problem, problem.worked), ARITHMETIC.answer_view(problem, "1+1=2")
    assert (right.state, right.lines) == ("good", problem.worked.split(";"))
    assert (wrong.state, wrong.score) == ("bad", "wrong")
    asked = TOOLS.heldout(1, 77)[0]
    silent = TOOLS.answer_view(asked, Conversation([{"role": "assistant", "content": ""}], num_turns=1, ended=True))
    assert (silent.state, silent.lines) == ("bad", [])
