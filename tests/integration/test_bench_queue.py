"""`sluice bench queue`, small and real: brokers, workers of every system, each measure; and its end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sluice.bench.queue.race import saq_is_installed
from tests.benches import bench_command, bench_environment, left_behind, run_bench
from tests.deadlines import HANG_S

OPTIONS = ["--quick", "--workers", "2"]
BY_COUNT = ("ours_jobs_s", "arq_jobs_s", "arq_best_jobs_s", "claims_per_job", "claim_calls_per_job")
SINGLE = ("idle_p50_ms", "idle_p99_ms", "bulk_enqueue_s", "ours_vs_arq_best", "ours_vs_arq")


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "queue", *OPTIONS, "--jobs", "300")
    assert all(found[name].keys() == {"2"} and found[name]["2"] > 0 for name in BY_COUNT)
    assert all(found[name] > 0 for name in SINGLE)
    assert found["commit_s"].keys() == {"1", "16", "256"}
    assert all(rate > 0 for rate in [*found["commit_s"].values(), *found["claim_us"].values()])
    assert len(found["claim_us"]) == 2
    assert (found["saq_jobs_s"] is not None) == saq_is_installed()
    assert found["claims_per_job"]["2"] >= 1.0
    deaths = found["deaths"]["2"]
    assert deaths["limit_s"] == pytest.approx(2 * deaths["quiet_s"] + deaths["start_s"], rel=1e-3)
    assert min(deaths["killed_s"], deaths["quiet_s"]) >= found["deaths_job_s"]  # which is longer is up to the machine
    assert found["aof"] == {"ours": "everysec", "arq": "off", "arq_best": "off", "saq": "off", "calls": "everysec"}
    assert left_behind(tmp_path) == []


def test_a_signal_ends_every_process(tmp_path: Path) -> None:
    """Brokers, paused workers, directories: nothing stays."""
    command, env = bench_command("queue", *OPTIONS), bench_environment()
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as bench:
        try:
            _wait_for_workers(tmp_path, bench)
            assert len(_processes_of(tmp_path)) > 3  # the bench, three brokers, workers
            bench.send_signal(signal.SIGINT)
            printed, _ = bench.communicate(timeout=HANG_S)
        finally:
            bench.kill()
    assert bench.returncode != 0
    assert b"Traceback" not in printed
    assert _processes_of(tmp_path) == []
    assert left_behind(tmp_path) == []


def _wait_for_workers(cwd: Path, bench: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + HANG_S
    while not list((cwd / ".sluice/bench").glob("run-*/ours-*.log")):
        assert bench.poll() is None, "the benchmark ended before its workers started"
        assert time.monotonic() < until, f"no worker's log for {HANG_S:.0f} s"
        time.sleep(0.05)


def _processes_of(cwd: Path) -> list[str]:
    """Command lines of all processes that run in that directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).is_relative_to(cwd):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
