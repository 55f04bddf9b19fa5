"""Estimates of an evaluation against what defines them, its files, and what follows from its results."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.consumers.evaluation.results import (
    Answer,
    Answers,
    Result,
    Results,
    bootstrap,
    evaluations,
    interval,
    pass_at_k,
    prune,
    read_answers,
    summary,
    wilson,
)
from sluice.pipeline.config.types import EvalConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.status.evaluation import best_of


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(case: tuple[int, int, int]) -> None:
    n, right, k = case
    draws = list(itertools.combinations([at < right for at in range(n)], k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("case", [(2, 0, 3), (2, 3, 1), (2, 1, 0)])
def test_pass_at_k_of_too_few_answers_is_an_error(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*case)


@given(st.integers(1, 400).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilsons_ends_are_the_shares_that_the_score_test_just_accepts(case: tuple[int, int]) -> None:
    successes, total = case
    share, low, high = wilson(successes, total)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            score = abs(share - end) / math.sqrt(end * (1 - end) / total)
            assert score == pytest.approx(1.959964, rel=1e-4)


def test_the_bootstraps_interval_is_that_of_the_normal_approximation_for_many_prompts() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=4000).tolist()
    mean, low, high = bootstrap(values, seed=0)
    half = 1.96 * float(np.std(values)) / math.sqrt(len(values))
    assert mean == pytest.approx(float(np.mean(values)))
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)
    assert bootstrap(values, seed=0) == bootstrap(values, seed=0)
    assert interval([0.5], seed=0) == (0.5, 0.5, 0.5)
    assert interval([0.0, 1.0], seed=0) == wilson(1, 2)


def answer(row: int, index: int = 0, reward: float | None = None, **rest: Any) -> Answer:
    return Answer(row=row, index=index, reward=reward, **rest)


def test_a_summary_is_over_prompts_and_leaves_out_what_failed() -> None:
    given = [
        *(answer(0, index, float(index == 0), metrics={"reward/length": 1.0 + index}) for index in range(3)),
        *(answer(1, index, 0.0, metrics={"reward/length": 4.0}, finish_reason="length") for index in range(3)),
        answer(2, 0, 1.0),
        answer(2, 1, failed="reward_timeout"),
        answer(2, 2, failed="version_gone"),
        answer(3, 0, failed="invalid_request"),
    ]
    found = summary(given, EvalConfig(n=3, k=(1, 3), temperature=1.0), seed=0)
    assert found["eval/pass@1"] == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert found["eval/pass@3"] == pytest.approx((1 + 0) / 2), "the third prompt has one answer left"
    assert found["eval/reward_mean"] == pytest.approx((1 / 3 + 0 + 1) / 3), "a prompt counts once"
    assert found["eval/reward/length"] == pytest.approx((2 + 4) / 2)
    counts = {"eval/prompts": 3, "eval/sequences": 7, "eval/failed": 3, "eval/truncated_rate": 3 / 7}
    assert {name: found[name] for name in counts} == pytest.approx(counts)
    passes = summary(given, EvalConfig(pass_above=1.0), seed=0)["eval/pass@1"]
    assert passes == 0.0


def test_without_rewards_it_has_the_tasks_own_metrics() -> None:
    metrics = {"rollout/matched_for_supervision": 1.0, "rollout/valid_pred_objects": 2.0, "rollout/gt_objects": 1.0}
    found = summary([answer(0, metrics=metrics)], EvalConfig(), seed=0)
    assert (found["eval/precision"], found["eval/recall"]) == (0.5, 1.0)
    assert not [key for key in found if "pass@" in key or "reward" in key]
    empty = summary([answer(0, failed="x")], EvalConfig(), seed=0)
    assert empty == {"eval/prompts": 0, "eval/sequences": 0, "eval/failed": 1, "eval/truncated_rate": 0}


def test_answers_survive_a_torn_line_and_count_once(tmp_path: Path) -> None:
    first = Answers(tmp_path, 3, "q")
    first.add([answer(0, 0, 1.0), answer(0, 1)])
    with first.path.open("ab") as stream:
        stream.write(b'{"row":1,"index":0,"text":"to')
    again = Answers(tmp_path, 3, "q")
    assert sorted(again.found) == [(0, 0), (0, 1)]
    again.add([answer(1, 0, text="whole"), answer(0, 0, 9.0)])
    assert [(one.row, one.index, one.reward) for one in read_answers(again.path)] == [
        (0, 0, 1.0), (0, 1, None), (1, 0, None),
    ]  # fmt: skip
    assert Answers(tmp_path, 3, "q").found[1, 0].text == "whole"


def test_other_questions_or_a_damaged_head_start_it_over(tmp_path: Path) -> None:
    Answers(tmp_path, 3, "q").add([answer(0)])
    assert not Answers(tmp_path, 3, "other").found
    Answers(tmp_path, 3, "other").path.write_bytes(b"junk\n")
    assert not Answers(tmp_path, 3, "other").found


@pytest.mark.parametrize(("keep", "left"), [(None, [0, 1, 2, 3]), (2, [1, 2, 3]), (0, [1]), (9, [0, 1, 2, 3])])
def test_the_newest_answers_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for version in range(4):
        Answers(tmp_path, version, "q")
    prune(tmp_path, keep, but=1)
    assert [version for version, _ in evaluations(tmp_path)] == left


def results_of(tmp_path: Path, *values: float, **options: Any) -> Results:
    found = Results(tmp_path, EvalConfig(**options))
    for version, value in enumerate(values):
        found.add(Result(version, 1.0 + version, {"eval/pass@1": value, "eval/sequences": 2.0}))
    return found


@pytest.mark.parametrize(
    ("values", "options", "best", "since", "stops"),
    [
        ([], {}, None, 0, False),
        ([0.1, 0.4, 0.3], {}, 1, 1, False),
        ([0.1, 0.4, 0.3, 0.4], {"patience": 2}, 1, 2, True),
        ([0.1, 0.4, 0.3, 0.5], {"patience": 2}, 3, 0, False),
        ([0.1, 0.4, 0.39, 0.41], {"patience": 2, "min_delta": 0.05}, 1, 2, True),
        ([0.1, 0.4, 0.41], {"patience": 2, "min_delta": 0.05}, 1, 1, False),
    ],
)
def test_the_best_version_and_the_stop_follow_from_the_file(
    tmp_path: Path, values: list[float], options: dict[str, Any], best: int | None, since: int, stops: bool
) -> None:
    made = results_of(tmp_path, *values, **options)
    for now in (made.state(), Results(tmp_path, EvalConfig(**options)).state()):
        assert (now.best, now.since_best, bool(now.stops), now.running) == (best, since, stops, None)
        assert now.held == (frozenset() if best is None else {best})
    made.store_best(made.state())
    assert best_of(tmp_path) == best
    more = Results(tmp_path, EvalConfig(patience=9)).state()
    assert not more.stops, "with more patience the run goes on"
    assert not Results(tmp_path, EvalConfig(keep_best=False)).state().held


def test_lines_of_others_and_torn_ones_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "evals.jsonl"
    path.write_bytes(b'{"version": 7, "at": 1, "f1": 0.5}\n{"version": 1, "at": 1, "eval/pa')
    found = results_of(tmp_path, 0.25)
    found.add(Result(0, 9.0, {"eval/pass@1": 1.0}))
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2]) == {"version": 0, "at": 1.0, "eval/pass@1": 0.25, "eval/sequences": 2.0}
    assert Results(tmp_path, EvalConfig()).versions == {0}


SCORED, FEWER = {"eval/pass@4": 0.667, "eval/reward_mean": 0.433}, {"eval/reward_mean": 0.8}


@pytest.mark.parametrize("metric", ["pass@4", None])
@pytest.mark.parametrize(
    ("values", "best", "value", "since"),
    [
        ([SCORED, FEWER], 0, 0.667, 1),
        ([FEWER, SCORED], 1, 0.667, 0),
        ([FEWER, SCORED, {"eval/pass@4": 0.7, "eval/reward_mean": 0.1}, FEWER], 2, 0.7, 1),
        ([SCORED, {}, FEWER], 0, 0.667, 2),
    ],
)
def test_all_evaluations_are_compared_by_one_metric_and_one_without_it_is_no_better(
    tmp_path: Path, metric: str | None, values: list[dict[str, float]], best: int, value: float, since: int
) -> None:
    """An evaluation has no pass@4 if each of its prompts has an answer that could not be scored."""
    options = EvalConfig(n=4, k=(4, 1), temperature=1.0, metric=metric, patience=2)
    made = Results(tmp_path, options)
    for version, row in enumerate(values):
        made.add(Result(version, 1.0, {**row, "eval/sequences": 3.0 if row else 0.0}))
    for now in (made.state(), Results(tmp_path, options).state()):
        assert (now.metric, now.best, now.best_value, now.since_best) == ("pass@4", best, value, since)
        assert bool(now.stops) == (since == 2)


def test_what_no_evaluation_has_falls_back_to_the_next_metric(tmp_path: Path) -> None:
    options = EvalConfig(n=4, k=(4,), temperature=1.0)
    made = Results(tmp_path, options)
    for version, reward in enumerate((0.2, 0.3)):
        made.add(Result(version, 1.0, {"eval/reward_mean": reward, "eval/f1": 0.9 - version, "eval/sequences": 3.0}))
    for now in (made.state(), Results(tmp_path, options).state()):
        assert (now.metric, now.best, now.best_value) == ("reward_mean", 1, 0.3)


def test_an_unknown_metric_is_an_error_that_names_those_that_are_there(tmp_path: Path) -> None:
    unknown = r"eval\.metric 'accuracy' is none of what was measured \(pass@1"
    made = Results(tmp_path, EvalConfig(metric="accuracy"))
    made.add(Result(0, 1.0, {"eval/sequences": 0.0}))
    for _ in range(2):
        with pytest.raises(ConfigError, match=unknown):
            made.add(Result(1, 1.0, {"eval/pass@1": 0.25, "eval/sequences": 2.0}))
        made = Results(tmp_path, EvalConfig(metric="accuracy"))
        assert made.versions == {0}, "with another metric it is made again, of the answers that are there"
    results_of(tmp_path, 0.1, 0.25)
    with pytest.raises(ConfigError, match=unknown):
        Results(tmp_path, EvalConfig(metric="accuracy"))


def test_a_pass_at_k_that_answers_with_rewards_could_have_is_not_unknown(tmp_path: Path) -> None:
    options = EvalConfig(n=4, k=(1, 4), temperature=1.0, metric="pass@4")
    made = Results(tmp_path, options)
    made.add(Result(0, 1.0, {"eval/reward_mean": 0.5, "eval/sequences": 3.0}))
    for now in (made.state(), Results(tmp_path, options).state()):
        assert (now.metric, now.best, now.since_best, now.stops) == ("pass@4", None, 1, "")
    for other in (replace(options, metric="pass@2"), replace(options, k=(1,))):
        with pytest.raises(ConfigError, match="is none of what was measured"):
            Results(tmp_path, other)
    (tmp_path / "evals.jsonl").unlink()
    with pytest.raises(ConfigError, match="is none of what was measured"):
        Results(tmp_path, options).add(Result(0, 1.0, {"eval/f1": 0.5, "eval/sequences": 3.0}))
