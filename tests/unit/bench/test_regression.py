"""`sluice bench all`: what counts as moved, against stored runs; then one for real beside one that fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sluice.bench.harness import HOME
from sluice.bench.models import demo_model
from sluice.bench.regression import (
    GUARDED,
    Measured,
    Stored,
    chosen,
    facts,
    figure_of,
    moved,
    read_stored,
    refuse_other_machine,
    summary,
)
from sluice.pipeline.cli.main import build
from sluice.pipeline.errors import ConfigError, DataError
from tests.benches import bench_command, bench_environment, left_behind
from tests.command import walk
from tests.deadlines import RUN_S

HERE = {"cpu": "Some CPU @ 2.0 GHz, 2 of 2 usable", "gpus": [], "torch": "2.13.0"}
SIZES = {name: list(bench.options) for name, bench in GUARDED.items()}


def stored(path: Path, benches: dict[str, Any], **more: Any) -> Path:
    sizes = {name: SIZES[name] for name in benches}
    whole = {"schema_version": 1, "machine": HERE, "rounds": 3, "sizes": sizes, "failed": {}, "benches": benches}
    path.write_text(json.dumps({**whole, **more}))
    return path


def figure(value: float, spread: float) -> dict[str, float]:
    return {"value": value, "spread": spread}


@pytest.fixture
def base(tmp_path: Path) -> Stored:
    figures = {"efficiency": figure(0.9, 0.05), "latency_queue_p50_s": figure(0.1, 0.02)}
    whole = {"pipeline": figures, "truth": {"tokens_wrong": figure(0.0, 0.0)}}
    return read_stored(stored(tmp_path / "base.json", whole))


@pytest.mark.parametrize(
    ("bench", "name", "value", "spread", "verdict"),
    [
        ("pipeline", "efficiency", 0.81, 0.04, None),  # 0.85 is in both ranges
        ("pipeline", "efficiency", 0.81, 0.03, "worse"),
        ("pipeline", "efficiency", 0.99, 0.03, "better"),
        ("pipeline", "latency_queue_p50_s", 0.15, 0.02, "worse"),
        ("pipeline", "latency_queue_p50_s", 0.05, 0.02, "better"),
        ("truth", "tokens_wrong", 0.0, 0.0, None),
        ("truth", "tokens_wrong", 1.0, 0.0, "worse"),
    ],
)
def test_a_figure_moved_if_the_ranges_do_not_meet(
    base: Stored, bench: str, name: str, value: float, spread: float, verdict: str | None
) -> None:
    now = {which: dict(figures) for which, figures in base.benches.items()}
    now[bench][name] = Measured(value, spread)
    found = moved(base, SIZES, now)
    assert [one.verdict for one in found] == ([] if verdict is None else [verdict])
    assert all((one.bench, one.figure) == (bench, name) and name in one.line() for one in found)


def test_a_figure_that_is_gone_has_moved_and_a_bench_that_did_not_run_or_has_another_size_has_not(base: Stored) -> None:
    now = {"pipeline": {"efficiency": Measured(0.9, 0.0)}}
    assert [(one.figure, one.verdict) for one in moved(base, SIZES, now)] == [("latency_queue_p50_s", "gone")]
    assert moved(base, {**SIZES, "pipeline": ["--sequences", "7"]}, now) == []


def test_the_spread_is_the_farthest_round_or_the_floor() -> None:
    assert Measured.of([10.0, 13.0, 9.0], 0.15) == Measured(10.0, 3.0)
    assert Measured.of([10.0, 10.0, 10.1], 0.15) == Measured(10.0, 1.5)
    assert Measured.of([2.0], 0.0) == Measured(2.0, 0.0)


@pytest.mark.parametrize("rounds", [[0.0, 0.0, 5.0], [5.0, 0.0, 0.0], [0.0, 5.0, 5.0], [0.0, 5.0, 9.0]])
def test_what_must_not_change_may_not_differ_in_one_round(rounds: list[float]) -> None:
    clean = Measured.of([0.0, 0.0, 0.0], 0.0)
    assert clean.meets(Measured.of([0.0], 0.0))
    assert not clean.meets(Measured.of(rounds, 0.0))


def test_a_figure_must_be_in_every_round() -> None:
    rounds = [{"efficiency": 0.9, "cpu_efficiency": 0.9}, {"efficiency": 0.8, "cpu_efficiency": None}]
    benches, absent = summary({"pipeline": rounds})
    assert benches == {
        "pipeline": {"efficiency": Measured.of([0.9, 0.8], GUARDED["pipeline"].figures["efficiency"].floor)}
    }
    assert "pipeline.cpu_efficiency" in absent
    assert figure_of({"a": {"32": True}}, "a.32") == 1.0
    assert figure_of({"a": None}, "a.32") is None


def test_another_machine_is_refused_by_name_and_newer_libraries_are_not(base: Stored) -> None:
    refuse_other_machine(base, {**HERE, "torch": "2.14.0"}, "base.json")
    with pytest.raises(ConfigError, match=r"base\.json.*Some CPU @ 2\.0 GHz.*Another CPU.*--any-machine"):
        refuse_other_machine(base, {**HERE, "cpu": "Another CPU, 8 of 8 usable"}, "base.json")
    with pytest.raises(ConfigError, match="gpus"):
        refuse_other_machine(base, {**HERE, "gpus": ["H100"]}, "base.json")
    assert facts()["cpu"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"machine": {}}', '{"machine": {}, "rounds": 1, "sizes": {}, "benches": {"a": 1}}']
)
def test_a_file_that_is_no_stored_run_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=r"x\.json"):
        read_stored(tmp_path / "x.json")
    with pytest.raises(DataError, match=r"y\.json"):
        read_stored(tmp_path / "y.json")


def test_an_unknown_bench_is_refused_with_the_nearest_name() -> None:
    assert chosen(["scale", "scale", "truth"]) == ["scale", "truth"]
    with pytest.raises(ConfigError, match="did you mean pipeline"):
        chosen(["pipelines"])


def test_a_guarded_bench_is_a_command_with_figures() -> None:
    assert {words[1] for words, _ in walk(build("bench")) if words[0] == "bench" and words[1:]} >= GUARDED.keys()
    assert all(bench.figures for bench in GUARDED.values())


def test_one_that_fails_is_named_and_the_next_one_is_compared(tmp_path: Path) -> None:
    (demo_model(tmp_path / HOME) / "config.json").unlink()
    figures = {name: figure(1e-9, 0.0) for name in GUARDED["scale"].figures}
    others = {name: figure(1.0, 0.0) for name in GUARDED["truth"].figures}
    base = stored(tmp_path / "base.json", {"scale": figures, "truth": others}, machine=facts())
    command = bench_command(
        "all", "--json", "--only", "pipeline", "--only", "scale", "--rounds", "1", "--compare", base.name,
        "--out", "now.json",
    )  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=bench_environment(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "now.json").read_text())
    assert read_stored(tmp_path / "now.json").benches.keys() == {"scale"}
    assert found["failed"].keys() == {"pipeline"}
    assert "config.json" in found["failed"]["pipeline"]
    assert found["benches"]["scale"].keys() == figures.keys(), found["absent"]
    assert {one["figure"] for one in found["moved"]} == figures.keys()
    assert "scale us_per_sequence.10000" in done.stderr
    assert found["not_compared"] == ["truth"]
    assert "not compared, for only one of both has them, or at another size: truth" in done.stderr
    assert left_behind(tmp_path) == ["model"]
