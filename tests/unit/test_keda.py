"""The autoscaler that tests/e2e/test_elastic.py drives workers with, over the clock, against the documented rules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.keda import Autoscaler

WORKERS = Path(__file__).parents[2] / "deploy/kubernetes/components/scaling/worker.yaml"


def decided(scaler: Autoscaler, jobs: Iterable[int], every_s: float = 10.0) -> list[int]:
    replicas, found = 0, list[int]()
    for at, count in enumerate(jobs):
        replicas = scaler.decide(at * every_s, count, replicas)
        found.append(replicas)
    return found


def test_from_none_to_one_then_as_the_formula_says() -> None:
    assert decided(Autoscaler.of(WORKERS), [0, 1, 40, 64, 70, 96]) == [0, 1, 2, 2, 2, 3]  # 70 is within 10 % of 64


def test_up_at_most_four_more_or_twice_as_many_in_fifteen_seconds() -> None:
    assert decided(Autoscaler.of(WORKERS), [1, 10_000, 10_000, 10_000, 10_000]) == [1, 5, 5, 10, 10]
    assert decided(Autoscaler.of(WORKERS), [1, *[10_000] * 8])[-1] == 16  # maxReplicaCount


def test_down_only_once_the_window_has_no_higher_recommendation_and_a_quarter_a_minute() -> None:
    found = decided(Autoscaler.of(WORKERS), [1, 128, *[40] * 30])
    assert found[1] == 4
    first = found.index(3)
    assert first == 20, "180 s after the last recommendation of 4"
    assert found[first : first + 6] == [3] * 6, "25 % of 4 in 60 s"
    assert found[first + 6] == 2
    assert min(found[1:]) == 2


def test_to_none_only_after_the_cooldown_without_a_job() -> None:
    quiet = decided(Autoscaler.of(WORKERS), [5, *[0] * 40])
    assert quiet.index(0) == 30, "300 s after the last job"
    assert 0 not in decided(Autoscaler.of(WORKERS), [5, *[0] * 29, 1, *[0] * 29])


def test_times_are_divided() -> None:
    scaler = Autoscaler.of(WORKERS, faster=60.0, threshold=4.0)
    assert (scaler.cooldown_s, scaler.stabilization_s, scaler.threshold, scaler.most) == (5.0, 3.0, 4.0, 16)
