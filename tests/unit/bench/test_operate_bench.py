"""`sluice bench operate`, small and real: every page of a dashboard process, the help, metrics and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.bench.models import demo_model
from sluice.bench.operate import Plan, aims, fill_history
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, SluiceError
from tests.benches import left_behind, run_bench


@pytest.mark.parametrize("options", [{"sequences": 0}, {"rounds": 0}])
def test_counts_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Plan.of(**{"sequences": None, "rounds": None, "quick": True, **options})  # pyright: ignore[reportArgumentType]


def test_an_aim_is_met_at_its_bound_and_missed_beyond_it() -> None:
    found = aims({"dashboard_p95_ms_max": 150.0, "help_s": 0.31, "metrics_overhead": -0.02, "trace_overhead": 0.02})
    assert [each["met"] for each in found.values()] == [True, False, True, False]


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "operate", "--quick")
    pages = found["dashboard_p95_ms"]
    assert {"overview", "jobs", "job", "sequences", "sequence", "workers", "weights", "dead letters"} <= pages.keys()
    assert found["dashboard_p95_ms_max"] == max(pages.values())
    assert all(found[name] == pages[name] for name in ("curves", "search", "group", "compare"))
    assert found["indexed_s"] >= 0
    assert found["index_bytes_per_sequence"] > 0
    assert all(0 < found["dashboard_p50_ms"][name] <= pages[name] for name in pages)
    assert (found["finished"], found["help_s"] > 0) == (found["sizes"]["finished"], True)
    assert found["metrics_overhead"] == pytest.approx(
        1 - found["tok_s_with_metrics"] / found["tok_s_without"], rel=1e-3, abs=1e-3
    )
    per_sequence_us = found["spans_per_sequence"] * found["span_cpu_us"]
    assert found["trace_overhead"] == pytest.approx(per_sequence_us / found["sequence_cpu_us"], rel=0.01)
    assert 11 < found["spans_per_sequence"] < 14
    assert left_behind(tmp_path) == ["model"]


async def test_pages_over_a_history_that_lacks_sequences_are_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "history").write_text("a file where the folder should be")
    config = load_config(None, ["run=r", f"run_dir={tmp_path}", f"model.path={demo_model(tmp_path)}"], environ={})
    with pytest.raises(SluiceError, match="only 0 of 8 sequences are in the history"):
        await fill_history(config, 8)
