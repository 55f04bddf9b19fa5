"""Runs `sluice bench` as a person does, in a directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.bench.harness import HOME
from sluice.bench.processes import Parent
from tests.deadlines import RUN_S

ROOT = Path(__file__).resolve().parents[1]


def bench_command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "sluice.pipeline.cli.main", "bench", name, *options]


def bench_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run_bench(cwd: Path, name: str, *options: str) -> dict[str, Any]:
    """The JSON object that it prints."""
    command = bench_command(name, "--json", *options)
    done = subprocess.run(
        command, cwd=cwd, env=bench_environment(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def left_behind(cwd: Path) -> list[str]:
    """The first word of what lies in the benchmarks' directory: models stay, everything else must be gone."""
    return sorted(path.name.partition("-")[0] for path in (cwd / HOME).iterdir())


async def serve_shares(parent: Parent, number: int) -> None:
    """A child of `sluice.bench.processes`: tells each request's share of `number`."""
    async for request in parent.requests(int):
        print("what a library says")
        parent.tell(number / request)
