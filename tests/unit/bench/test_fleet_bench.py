"""`sluice bench fleet`: what is fair, what runs ask for, and one small real run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sluice.bench.fairness import entitled, jain
from sluice.bench.fleet import Plan
from sluice.pipeline.errors import ConfigError
from tests.benches import left_behind, run_bench


def test_jains_index() -> None:
    assert (jain([3, 3, 3]), jain([1, 0, 0, 0])) == (1.0, 0.25)
    assert jain([1.0] * 19 + [0.0]) == pytest.approx(0.95)  # 20 runs of which one starves are at the aim's border


def test_nobody_is_entitled_to_more_than_it_asks_for_and_the_rest_is_divided_by_weight() -> None:
    assert entitled({"a": 1, "b": 9, "c": 9}, {"a": 1, "b": 1, "c": 3}, 9) == {"a": 1, "b": 2.0, "c": 6.0}
    found = entitled({"a": math.inf, "b": 30, "c": 5}, {"a": 1.0, "b": 2.0, "c": 4.0}, 100)
    assert found == {"a": 65.0, "b": 30, "c": 5}


def test_one_run_is_no_fleet() -> None:
    with pytest.raises(ConfigError, match="--runs must be 2 to 256"):
        Plan.of(runs=1)


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "fleet", "--quick", "--runs", "4", "--seconds", "2")
    assert len(found["jain"]) == len(found["tokens_per_s"]) == found["sizes"]["rounds"] == 1
    assert 0.25 < found["jain"][0] <= 1
    assert 0 < found["lowest_share"] <= 1.0 < found["highest_share"] + 1e-9
    assert found["rate_share"] > 0
    assert left_behind(tmp_path) == ["model"]
