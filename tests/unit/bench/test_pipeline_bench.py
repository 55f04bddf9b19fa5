"""`sluice bench pipeline`, small and real: broker, worker, bare engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FIELDS = {
    "schema_version", "bare_tok_s", "pipeline_tok_s", "efficiency", "bytes_per_token", "latency_p50_s", "latency_p99_s",
}  # fmt: skip


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "bench", "pipeline", "--json"]
    options = ["--sequences", "16", "--workers", "1", "--rounds", "1", "--max-batch", "4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= FIELDS
    assert all(found[name] > 0 for name in FIELDS)
    assert (found["sequences"], found["workers"], found["rounds"]) == (16, 1, 1)
    assert [path.name.partition("-")[0] for path in (tmp_path / ".sluice/bench").iterdir()] == ["model"]
