"""Which tests run when. One table: `make test` runs what is in no row, `make test-all` the first row as well.

A tier is a marker of the same name, so that `pytest -m late` works too. Tests are sent to processes file by file; those
that share a started vLLM go to one, as an engine takes longer to start than their tests to run. Tests that start one of
their own are late.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Tier(NamedTuple):
    """Tests by the beginnings of their node ids, seen from tests/."""

    command: str
    what: str
    where: tuple[str, ...]
    but: tuple[str, ...] = ()


TIERS = {
    "late": Tier(
        "make test-all",
        "whole runs over processes, kills, commands of the documents, benches, one engine a test",
        (
            "chaos/",
            "hosts/",
            "e2e/",
            "contract/test_architectures",
            "contract/test_engine_carrier.py::test_other_layouts",
            "contract/test_carriers.py::test_a_publisher_killed_in_any_phase",
            "contract/test_carriers.py::test_damage_in_a_bucket",
            "contract/test_policy_loss_trl.py",
            "contract/test_spec_vllm.py::test_vllm_vlm_request",
            "contract/test_vllm_ends.py",
            "contract/test_vllm_parity.py",
            "contract/test_vllm_start.py",
            "contract/test_vllm_weights.py",
            "contract/test_weight_transfer.py::test_a_vllm_that",
            "contract/test_vlm_vllm.py",
            "integration/test_bench_queue.py",
            "integration/test_bench_scale.py",
            "integration/test_fleet.py::test_vllm",
            "integration/dashboard/test_browser",
            "soak/test_hang.py",
            "soak/test_outsider.py",
            "soak/test_bench_guard_runs.py",
            "unit/bench/test_bench_engine.py",
            "unit/bench/test_bench_guard.py",
            "unit/bench/test_bench_proximal.py",
            "unit/bench/test_crash_bench.py::test_a_run",
            "unit/bench/test_elastic_bench.py::test_small",
            "unit/bench/test_fleet_bench.py::test_a_small",
            "unit/bench/test_images_bench.py",
            "unit/bench/test_operate_bench.py",
            "unit/bench/test_pipeline_bench.py",
            "unit/bench/test_regression.py::test_one_that_fails",
            "unit/bench/test_rollout_bench.py",
            "unit/bench/test_train_bench.py",
            "unit/bench/test_weights_bench.py::test_small",
            "unit/test_import_name.py::test_pyright",
        ),
        but=("e2e/test_pipeline.py",),
    ),
    "soak": Tier(
        "make soak", "hours of random faults, every mutant", ("soak/test_soak", "soak/test_recovery", "soak/test_fuzz")
    ),
    "clients": Tier("make test-clients", "other packages, in environments of their own", ("clients/",)),
    "gpu": Tier("make test-gpu", "what only a GPU can show", ("gpu/",)),
}
_ONE_ENGINE = {"vllm", "guarded_vllm", "backend", "guarded"}  # fixtures that start a vLLM for the whole session
_SHOWN_LINES = 25  # of a failure, when it happens
_COUNTED = ("failed", "passed", "skipped", "deselected", "xfailed", "error")


def tier_of(nodeid: str) -> str:
    """The tier of a test, or "" for those of `make test`."""
    place = nodeid.removeprefix("tests/")
    return next((name for name, t in TIERS.items() if place.startswith(t.where) and not place.startswith(t.but)), "")


def mark(items: list[pytest.Item]) -> None:
    """Mark every test with its tier and with the process that it goes to."""
    for item in items:
        is_contract = "contract/" in item.nodeid
        shared = is_contract and _ONE_ENGINE & set(getattr(item, "fixturenames", ()))
        starts_its_own = is_contract and item.get_closest_marker("vllm") is not None and not shared
        if tier := tier_of(item.nodeid) or ("late" if starts_its_own else ""):
            item.add_marker(tier)
        item.add_marker(pytest.mark.xdist_group("engines" if shared else item.nodeid.partition("::")[0]))


def say_left_out(terminal: pytest.TerminalReporter, chosen: str) -> None:
    """Which tiers a run with `-m chosen` did not hold, and where they are run."""
    for name, tier in TIERS.items():
        if f"not {name}" in chosen:
            terminal.write_line(f"left out: {name} ({tier.what}): {tier.command}")


def skip_without_time(item: pytest.Item, now: float) -> None:
    """Leave out a test of the tier `late` that would begin after SLUICE_LATE_UNTIL (seconds since 1970)."""
    until = float(os.environ.get("SLUICE_LATE_UNTIL") or math.inf)
    if now > until and item.get_closest_marker("late") is not None:
        pytest.skip(f"not run, no time was left: {item.nodeid}")  # named, as skips of one place are summed up


def say_failed(report: pytest.TestReport) -> None:
    """Print a failure when it happens: of a run that is cut off, nothing is printed at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = report.longreprtext.splitlines()[-_SHOWN_LINES:]
        print(f"\n{report.when} of {report.nodeid} failed:", *last, sep="\n  ", file=sys.__stdout__, flush=True)


def tally(terminal: pytest.TerminalReporter, seconds: float) -> None:
    """Add a run's counts to the file that SLUICE_TEST_TALLY names."""
    path = os.environ.get("SLUICE_TEST_TALLY")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:  # each of those sums up its own part as well
        counts = {name: len(terminal.stats.get(name, ())) for name in _COUNTED}
        with Path(path).open("a") as file:
            file.write(json.dumps({**counts, "seconds": round(seconds, 2)}) + "\n")


def total(path: Path) -> int:
    """Print the sum of a tally as pytest would; the exit status."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    summed = {name: sum(run[name] for run in runs) for name in (*_COUNTED, "seconds")}
    shown = [f"{summed[name]} {name}" for name in _COUNTED if summed[name] and name != "deselected"]
    print(f"{', '.join(shown)} in {summed['seconds']:.2f}s")
    return 1 if summed["failed"] or summed["error"] else 0


if __name__ == "__main__":
    sys.exit(total(Path(sys.argv[1])))
