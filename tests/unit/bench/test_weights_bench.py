"""`sluice bench weights`, small and real."""

from __future__ import annotations

from sluice.bench import harness
from sluice.bench.weights import measure


def test_small() -> None:
    plan = measure.Plan.of(layers=2, hidden=128, vocab=512, steps=3, rounds=2, threads=1, quick=True)
    found = harness.run(measure.measure, plan)
    assert 0 < found["delta_share"] < 0.2
    assert len(found["delta_shares"]) == 3
    assert found["bytes"]["delta"] < 0.5 * found["bytes"]["directory"] <= found["bytes"]["store"]
    assert found["vs_copy"]["delta"].keys() == found["delta_s"].keys() == {"100", "500", "2000"}
    assert all(value > 0 for value in found["vs_copy"]["delta"].values())
