"""`sluice bench engine`, small and real: our loop beside both of transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SIDES = {"hf", "padded", "continuous"}


def test_a_small_run_compares_equal_tokens_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "bench", "engine", "--json"]
    options = ["--counts", "4", "--rounds", "1", "--longest", "24", "--no-vllm"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hf_vs_padded"]["4"] > 0
    assert found["hf_vs_continuous"]["4"] > 0
    assert found["vllm_efficiency"] is None
    assert found["tokens_equal"] == {"padded": 1.0, "continuous": 1.0}
    assert found["tokens"] == {"4": 8 + 13 + 18 + 24}
    assert found["peak_mb"].keys() == found["startup_s"].keys() == found["tok_s"].keys() == SIDES
    assert [path.name.partition("-")[0] for path in (tmp_path / ".sluice/bench").iterdir()] == ["engine"]
