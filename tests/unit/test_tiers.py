"""The table of tiers: every row stands for tests that are there, and the sum of two runs is printed like pytest's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiers import TIERS, skip_without_time, tier_of, total

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", sorted(TIERS))
def test_every_row_stands_for_tests_that_are_there(name: str) -> None:
    files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("test_*.py")]
    for place in (*TIERS[name].where, *TIERS[name].but):
        file, _, test = place.partition("::")
        found = [one for one in files if one.startswith(file)]
        assert found, place
        assert not test or f"def {test}" in (ROOT / found[0]).read_text(), place


def test_a_test_is_in_one_tier() -> None:
    assert tier_of("tests/chaos/test_kill_workers.py::test_x[1]") == "late"
    assert tier_of("tests/soak/test_fuzz.py::test_x") == "soak"
    assert tier_of("tests/e2e/test_pipeline.py::test_x") == ""
    assert tier_of("tests/unit/pipeline/test_cli.py::test_x") == ""


def test_the_tests_of_a_file_go_to_one_process(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("loadgroup", False):  # as make test does; xdist shows the group behind the name
        assert request.node.nodeid.endswith("@tests/unit/test_tiers.py")
    marks = [mark.args for mark in request.node.iter_markers("xdist_group")]
    assert marks == [("tests/unit/test_tiers.py",)]


def test_only_a_late_test_is_left_out_when_no_time_is_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = request.node
    monkeypatch.setenv("SLUICE_LATE_UNTIL", "1000")
    skip_without_time(item, 2000)
    item.add_marker("late")
    skip_without_time(item, 999)
    with pytest.raises(pytest.skip.Exception, match=f"no time was left: tests/unit/test_tiers.py::{item.name}"):
        skip_without_time(item, 1001)
    monkeypatch.delenv("SLUICE_LATE_UNTIL")
    skip_without_time(item, 1e12)


@pytest.mark.parametrize(("failed", "status", "line"), [(0, 0, "15 passed, 1 skipped"), (2, 1, "2 failed, 15 passed")])
def test_the_sum_of_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: int, status: int, line: str
) -> None:
    run = {"failed": 0, "passed": 5, "skipped": 1, "deselected": 7, "xfailed": 0, "error": 0, "seconds": 1.5}
    runs = [run, {**run, "failed": failed, "passed": 10, "skipped": 0, "seconds": 2.0}]
    (tmp_path / "tally").write_text("".join(json.dumps(one) + "\n" for one in runs))
    assert total(tmp_path / "tally") == status
    said = capsys.readouterr().out
    assert said.startswith(line)
    assert said.endswith("in 3.50s\n")
