"""`sluice bench scale`, small and real: brokers, every role, workers that lease and workers that wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sluice.pipeline.cli.main", "bench", "scale", "--json"]
ROLES = {"producer", "worker", "consumer", "trainer"}


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--count", "1000", "--workers", "10", "--idle-s", "1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["us_per_sequence"].keys() == {"10", "100", "1000"}
    assert all(us > 0 for us in found["us_per_sequence"].values())
    assert found["rss_growth_share"].keys() == ROLES
    assert found["cpu_us_per_sequence"].keys() == ROLES | {"broker"}
    assert 100 < found["redis_bytes_per_queued_job"] < 10_000
    assert 0 < found["redis_bytes_end"] < 50 << 20
    assert 0 <= found["idle_broker_share_100_workers"] < 1
    assert (found["sequences"], found["idle_workers"], found["leased_jobs"]) == (1000, 10, 320)
    assert [path.name.partition("-")[0] for path in (tmp_path / ".sluice/bench").iterdir()] == ["model"]
