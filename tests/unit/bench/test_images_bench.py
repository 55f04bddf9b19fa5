"""`sluice bench images`, small and real: engine, trainer, queue and worker."""

from __future__ import annotations

from pathlib import Path

from sluice.bench.images import STAGES
from tests.benches import left_behind, run_bench


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "images", "--scenes", "4", "--group", "2", "--quick")
    assert sorted(found["seconds"]) == sorted(STAGES)
    assert abs(sum(found["share"].values()) - 1) < 1e-3
    assert found["pictures_processed_per_picture"] == 1
    assert found["processed_per_picture"].keys() == {"worker", "worker_fetched", "trainer"}
    assert found["tower_passes_per_picture"] == {
        "worker": {"frozen": 1, "trained": 2},
        "scorer": {"frozen": 1, "trained": 2},
        "trainer": {"frozen": 1, "trained": 4},
    }
    assert min(found["peak_mb"].values()) > 50
    assert left_behind(tmp_path) == ["pictures"]
