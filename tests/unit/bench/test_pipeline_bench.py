"""`sluice bench pipeline`, small and real: broker, worker, bare engine."""

from __future__ import annotations

from pathlib import Path

from tests.benches import left_behind, run_bench

FIELDS = {
    "schema_version", "bare_tok_s", "pipeline_tok_s", "efficiency", "bytes_per_token", "latency_p50_s", "latency_p99_s",
}  # fmt: skip


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    options = ["--sequences", "16", "--workers", "1", "--rounds", "1", "--max-batch", "4"]
    found = run_bench(tmp_path, "pipeline", *options)
    assert found.keys() >= FIELDS
    assert all(found[name] > 0 for name in FIELDS)
    assert (found["sequences"], found["workers"], found["rounds"]) == (16, 1, 1)
    assert left_behind(tmp_path) == ["model"]
