"""Curves from a run's files: steps of versions, cut files, thinning, what is learned, runs over each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.dashboard.render import STAGE_COLOURS
from sluice.consumers.history.curves import MOST_POINTS, Chart, RunCurves, line, overlaid
from tests.finished import row


def write(directory: Path, name: str, *lines: dict[str, Any], mode: str = "a") -> None:
    with (directory / name).open(mode) as stream:
        stream.writelines(json.dumps(each) + "\n" for each in lines)


def step(number: int, **values: float) -> dict[str, Any]:
    return {"step": number, "version": number - 1, "at": 1000.0 + 10 * number, **values}


def charts(curves: RunCurves) -> dict[str, Chart]:
    return {chart.key: chart for chart in curves.charts()}


def test_a_run_without_files_has_none(tmp_path: Path) -> None:
    curves = RunCurves(tmp_path / "nowhere")
    assert (curves.charts(), curves.change(), curves.newest, curves.times([])) == ([], None, None, [])


def test_lines_have_steps_times_and_values(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", *(step(n, **{"train/loss": 1 / n, "reward/format": 0.5}) for n in (1, 2, 3)))
    found = charts(RunCurves(tmp_path))
    [loss] = found["loss"].lines
    assert (loss.name, loss.steps, loss.values) == ("cross-entropy", [1, 2, 3], [1.0, 0.5, 0.333333])
    assert loss.at == [1010.0, 1020.0, 1030.0]
    assert [part.name for part in found["reward"].lines] == ["format"], "a part of the reward"


def test_a_held_out_score_is_at_the_step_that_made_its_version_and_apart_from_the_rollouts(tmp_path: Path) -> None:
    lines = [{**step(n, **{"rollout/f1": 0.9}), "version": version} for n, version in ((1, 0), (2, 0), (3, 1), (4, 4))]
    write(tmp_path, "metrics.jsonl", *lines)
    write(tmp_path, "evals.jsonl", *({"version": v, "at": 5.0 + v, "f1": v / 10} for v in (0, 1, 4, 9)))
    found = charts(RunCurves(tmp_path))
    assert found["heldout"].lines[0].steps == [0, 2, 3, 4], "the last one is of a version that no step started from yet"
    assert found["rollouts"].lines[0].values == [0.9] * 4
    assert "never trained on" in found["heldout"].about


def test_only_what_was_added_is_read_and_a_cut_file_is_read_again(tmp_path: Path) -> None:
    curves = RunCurves(tmp_path)
    write(tmp_path, "metrics.jsonl", step(1, **{"train/loss": 1.0}), step(2, **{"train/loss": 0.5}))
    assert charts(curves)["loss"].lines[0].values == [1.0, 0.5]
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "vers')
    assert charts(curves)["loss"].lines[0].values == [1.0, 0.5], "half a line"
    write(tmp_path, "metrics.jsonl", step(1, **{"train/loss": 1.0}), mode="w")
    write(tmp_path, "metrics.jsonl", *(step(n, **{"train/loss": 0.7}) for n in (2, 3, 4)))
    assert charts(curves)["loss"].lines[0].values == [1.0, 0.7, 0.7, 0.7], "cut, and longer again since"


def test_damaged_lines_and_what_is_no_number_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": "x"}\n[1]\n\n')
    write(tmp_path, "metrics.jsonl", step(1, **{"train/loss": 1.0}), {**step(2), "train/loss": None})
    write(tmp_path, "evals.jsonl", {"version": 0, "at": 1.0, "note": "text", "f1": True})
    found = charts(RunCurves(tmp_path))
    assert (list(found), found["loss"].lines[0].values) == (["loss"], [1.0])


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    made = line("x", [(n, n, float(n)) for n in range(10_001)])
    assert len(made.steps) == MOST_POINTS
    assert (made.steps[0] < 30, made.steps[-1], made.values[-1]) == (True, 10_000, 10_000.0)
    assert made.steps == sorted(made.steps)


def test_what_was_learned_is_the_held_out_score_if_there_is_one(tmp_path: Path) -> None:
    curves = RunCurves(tmp_path)
    write(tmp_path, "metrics.jsonl", *(step(n, **{"train/loss": 2.0 - n / 20}) for n in range(1, 21)))
    curves.charts()
    change = curves.change()
    assert change is not None
    assert (change.name, change.first, change.last) == ("cross-entropy", pytest.approx(1.925), pytest.approx(1.025))
    write(tmp_path, "evals.jsonl", *({"version": v, "at": 1.0, "f1": v / 40} for v in range(40)))
    curves.charts()
    change = curves.change()
    assert change is not None
    assert (change.name, change.first, change.last) == ("held-out F1", 0.0, 39 / 40), "the scores as they were"


def test_tokens_per_second_are_counted_over_seconds(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", *(step(n, **{"rollout/gen_new_tokens_total": 50.0}) for n in range(1, 6)))
    assert charts(RunCurves(tmp_path))["tokens"].lines[0].values == [5.0] * 4


def test_times_are_means_of_the_newest(tmp_path: Path) -> None:
    parts = {"train/score_s": 1.0, "train/step_s": 2.0, "train/publish_s": 3.0}
    write(tmp_path, "metrics.jsonl", *(step(n, **parts) for n in (1, 2)))
    curves = RunCurves(tmp_path)
    curves.charts()
    facts: dict[str, Any] = {"version_max": 0, "queue_s": 0.5, "decode_s": 1.5, "at": 1003.0, "step": 1}
    rows = [row("a", **facts), row("b", **{**facts, "queue_s": 1.5}), row("dead", state="dead", queue_s=99.0)]
    assert dict(curves.times(rows)) == {
        "queue": 1.0, "decode": 1.5, "wait for a batch": 4.0, "score": 1.0, "train": 2.0, "publish": 3.0,
    }  # fmt: skip
    colours = [STAGE_COLOURS[name] for name, _ in curves.times(rows)]
    assert colours == sorted(set(colours)), "each of them has a colour of its own"


def test_runs_are_drawn_over_each_other_in_colours_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", *(step(n, **{"train/loss": 1.0, "policy/loss": 0.1}) for n in (1, 2)))
    one = RunCurves(tmp_path).charts()
    both = overlaid([("empty", []), ("first", one), ("second", one)])
    assert [(each.name, each.colour) for each in both[0].lines] == [("first", 1), ("second", 2)]
    assert len(both) == len(one)


def test_unlike_quantities_of_two_runs_share_no_axis(tmp_path: Path) -> None:
    """A policy's loss beside the cross-entropy of teacher forcing."""
    for name, key in (("a", "policy/loss"), ("b", "train/loss"), ("c", "policy/loss")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "metrics.jsonl", *(step(n, **{key: 1.0}) for n in (1, 2)))
    drawn = overlaid([(name, RunCurves(tmp_path / name).charts()) for name in "abc"])
    found = {chart.key: (chart.about, [one.name for one in chart.lines]) for chart in drawn if chart.title == "Loss"}
    assert found == {
        "loss": ("policy loss, of the step", ["a", "c"]),
        "loss/cross-entropy": ("cross-entropy, of the step", ["b"]),
    }
