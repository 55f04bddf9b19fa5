"""`sluice bench engine`, small and real: our loop beside both of transformers' own."""

from __future__ import annotations

from pathlib import Path

from tests.benches import left_behind, run_bench

SIDES = {"hf", "padded", "continuous"}


def test_a_small_run_compares_equal_tokens_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "engine", "--counts", "4", "--rounds", "1", "--longest", "24", "--no-vllm")
    assert found["hf_vs_padded"]["4"] > 0
    assert found["hf_vs_continuous"]["4"] > 0
    assert found["vllm_efficiency"] is None
    assert found["tokens_equal"] == {"padded": 1.0, "continuous": 1.0}
    assert found["tokens"] == {"4": 8 + 13 + 18 + 24}
    assert found["peak_mb"].keys() == found["startup_s"].keys() == found["tok_s"].keys() == SIDES
    assert left_behind(tmp_path) == ["engine"]
