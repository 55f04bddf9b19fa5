"""`sluice bench train`, small and real: our step, plain passes and TRL's trainer."""

from __future__ import annotations

from sluice.bench import harness, train


def test_small() -> None:
    found = harness.run(train.measure, train.Plan.of(quick=True, rounds=1))
    assert found["peak_mb"].keys() == found["tok_s"].keys() == {"ours", "plain", "trl"}
    assert all(value > 0 for value in (*found["peak_mb"].values(), *found["tok_s"].values()))
    assert found["peak_vs_plain"] == found["peak_mb"]["ours"] / found["peak_mb"]["plain"]
    assert found["tok_s_vs_trl"] == found["tok_s"]["ours"] / found["tok_s"]["trl"]
    assert 0 < found["ranks_gradient_error"] < 1e-5 < found["ranks_gradient_error_bf16"] < 0.5
    assert all(found["terms"][name] > 0 for name in ("kl", "dpo", "reference"))
    assert found["parameters"] < 50_000_000
