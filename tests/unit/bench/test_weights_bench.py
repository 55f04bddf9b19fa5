"""`sluice bench weights`, small and real: every figure that it promises, by carrier."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.bench.weights.lines import CARRIERS
from sluice.bench.weights.measure import AIMS, Plan
from sluice.pipeline.errors import ConfigError
from tests.benches import left_behind, run_bench

BESIDE = {"directory", "engine", "delta-500"}
PARTS = {"snapshot", "write", "notice", "read", "verify", "load", "prefill", "token", "all"}


def test_small(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "weights", "--quick", "--backends", "hf", "--threads", "1")
    assert 0 < found["delta_share"] < 0.2
    assert len(found["delta_shares"]) == 3
    sizes = found["bytes"]["hf"]
    assert sizes["delta-500"] < 0.5 * sizes["directory"] <= sizes["store"]
    assert found["vs_copy"]["hf"].keys() == found["trip_s"]["hf"].keys() == set(CARRIERS)
    assert all(value > 0 for value in found["vs_copy"]["hf"].values())
    for key in ("publish_s", "stall_s", "step_slowdown_s", "to_first_token_s"):
        assert found[key]["hf"].keys() == BESIDE
    for split in found["to_first_token_s"]["hf"].values():
        assert split.keys() == PARTS
        assert sum(split[part] for part in PARTS - {"all"}) == pytest.approx(split["all"], rel=0.05, abs=0.02)
    assert all(value > 0 for value in found["late_join_s"]["hf"].values())
    assert found["aims"].keys() == {"delta_share", "stall_s / publish_s", *(f"vs_copy.{name}" for name in AIMS)}
    assert all(isinstance(each["met"], bool) for each in found["aims"].values())
    assert left_behind(tmp_path) == []


def test_backends_are_named() -> None:
    with pytest.raises(ConfigError, match="--backends 'sglang': give some of hf,vllm"):
        Plan.of(quick=True, backends="sglang", layers=1, hidden=128, vocab=512, steps=1, rounds=1, threads=1)
