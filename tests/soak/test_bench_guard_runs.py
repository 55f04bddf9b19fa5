"""`sluice bench guard` with its two whole runs, which take a minute or two; the rest is in tests/unit/bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stdout_is_one_json_object_whatever_the_runs_print(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "bench", "guard", "--json", "--quick", "--no-vllm"]
    command += ["--counts", "1", "--sequences", "2", "--longest", "320", "--run-sequences", "4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trained_per_s"]["off"] > 0
    assert found["trained_per_s"]["on"] > 0
