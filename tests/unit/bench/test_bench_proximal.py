"""`sluice bench proximal`: its parts that are pure, and a small real run on one engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sluice.bench.harness import HOME
from sluice.bench.models import endless_model
from sluice.bench.proximal.measure import aims
from sluice.bench.proximal.updates import Plan, Sample, Segment, due_steps, longest_gap, rate_fields, score_fields
from sluice.bench.proximal.versions import COUNT, Variants, ensure_variants
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.weights.versions import digest_of
from tests.benches import left_behind, run_bench


@pytest.mark.parametrize("interval", [50, 200, 1000])
def test_every_interval_gets_its_updates(interval: int) -> None:
    sizes = Plan()
    due = [due_steps(interval, number, sizes.segment) for number in range(sizes.segments)]
    assert sum(map(len, due)) == max(sizes.intervals) // interval
    flat = [number * sizes.segment + step for number, steps in enumerate(due) for step in steps]
    assert {after - before for before, after in itertools.pairwise(flat)} <= {interval}
    assert due_steps(None, 0, sizes.segment) == []


def test_costs_are_medians_of_ratios_and_processor_time_is_summed() -> None:
    rounds = [
        {"scored": Sample(seconds, 0.3), "recompute": Sample(1.0, 0.2), "none": Sample(0.1, 0.0)}
        for seconds in (1.0, 1.2, 9.0)
    ]
    found = score_fields(rounds)
    assert (found["vs_kv_recompute"], found["spread"], found["rounds"]) == (1.2, [1.0, 9.0], 3)
    assert found["vs_no_update"] == pytest.approx(12)
    assert found["by_cpu"] == pytest.approx(1.5)


def test_a_rate_is_that_of_all_segments_together() -> None:
    segments = {"50": [Segment(100, 1.0, [0.3]), Segment(100, 3.0, [0.1, 0.2])], "none": [Segment(200, 2.0, [])]}
    found = rate_fields(segments, rows=4)
    assert found == {
        "tok_s": {"50": 50.0, "none": 100.0},
        "spread": {"50": [100 / 3, 100.0], "none": [100.0, 100.0]},
        "updates": {"50": 3, "none": 0},
        "share": {"50": 0.5},
        "steps_between": {"50": pytest.approx(200 / 4 / 3)},
        "gap_s": {"50": 0.2},
    }


def test_a_gap_is_the_longest_time_without_a_token_around_an_update() -> None:
    times = [0.0, 1.0, 1.5, 4.0, 4.5, 9.0]
    assert longest_gap(times, 2, 4) == 2.5
    assert longest_gap(times, 0, 2) == 1.0
    assert longest_gap([], 0, 4) == 0.0


def test_aims_are_held_against_each_backend_and_the_worst_queue() -> None:
    costs = {"hf": {"vs_kv_recompute": 1.2}, "vllm": {"vs_kv_recompute": 1.2}}
    rates = {"hf": {"50": 0.7, "200": 0.8, "7": 0.1}}
    found = aims({"score_cost_ratio": costs, "rate_share": rates, "valid_share": {"1": 1.0, "4": 0.99}})
    assert {key: each["met"] for key, each in found["rate_share"]["hf"].items()} == {"50": True, "200": False}
    assert (found["score_cost_ratio"]["hf"]["met"], found["score_cost_ratio"]["vllm"]["met"]) == (False, True)
    assert found["valid_share"] == {"aim": ">= 1.0", "found": 0.99, "met": False}


@pytest.mark.parametrize("options", [{"backends": ""}, {"backends": "hf,trt"}, {"rounds": 0}])
def test_plans_out_of_range_are_refused(options: dict[str, object]) -> None:
    usual = {"backends": "hf", "rounds": None, "quick": True}
    with pytest.raises(ConfigError, match="--"):
        Plan.of(**{**usual, **options})  # pyright: ignore[reportArgumentType]


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / HOME
    variants = Variants.read(ensure_variants(home, endless_model(home)))
    assert len({digest_of(variants.directory(version)) for version in range(COUNT)}) == COUNT
    found = run_bench(tmp_path, "proximal", "--quick", "--backends", "hf", "--rounds", "1")
    first = found["publish_to_first_token_s"]["hf"]
    assert 0 < first["from_register"]["median"] < first["median"] <= first["worst"]
    assert first["fewest_sequences"] > 0
    cost = found["score_cost_ratio"]["hf"]
    assert cost["vs_kv_recompute"] == pytest.approx(cost["seconds"]["scored"] / cost["seconds"]["recompute"], rel=1e-3)
    assert found["updates_by_interval"]["hf"] == {"5": 8, "20": 2, "40": 1, "none": 0}
    assert found["tok_s_by_interval"]["hf"].keys() == {"5", "20", "40", "none"}
    assert found["rate_share"]["hf"].keys() == found["steps_between"]["hf"].keys() == {"5", "20", "40"}
    assert min(found["gap_s"]["hf"].values()) > 0
    assert found["valid_share"] == {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}
    measured = found["valid_share_tokens"]["4"]
    assert min(measured["in_flight"], measured["scored"], measured["recomputed"]) > 0
    assert found["aims"]["valid_share"]["met"]
    assert found["aims"].keys() == found["measured"].keys() <= found.keys()
    assert left_behind(tmp_path) == ["engine", "proximal"]
