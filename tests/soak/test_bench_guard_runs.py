"""`sluice bench guard` with its two whole runs, which take a minute or two; the rest is in tests/unit/bench."""

from __future__ import annotations

from pathlib import Path

from tests.benches import run_bench


def test_stdout_is_one_json_object_whatever_the_runs_print(tmp_path: Path) -> None:
    options = ["--counts", "1", "--sequences", "2", "--longest", "320", "--run-sequences", "4"]
    found = run_bench(tmp_path, "guard", "--quick", "--no-vllm", *options)
    assert found["trained_per_s"]["off"] > 0
    assert found["trained_per_s"]["on"] > 0
