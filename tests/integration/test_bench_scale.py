"""`sluice bench scale`, small and real: brokers, every role, workers that lease and workers that wait."""

from __future__ import annotations

from pathlib import Path

from sluice.pipeline.broker.embedded import find_server
from tests.benches import left_behind, run_bench

ROLES = {"producer", "worker", "consumer", "trainer"}


def test_a_small_run_prints_every_field_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_bench(
        tmp_path, "scale", "--count", "1000", "--workers", "10", "--idle-s", "1", "--tokens", "100", "--policy"
    )
    assert found["us_per_sequence"].keys() == {"10", "100", "1000"}
    assert all(us > 0 for us in found["us_per_sequence"].values())
    assert found["rss_growth_share"].keys() == ROLES
    assert found["cpu_us_per_sequence"].keys() == ROLES | {"broker"}
    assert found["cpu_us_at_marks"].keys() == found["us_per_sequence"].keys()
    assert all(used.keys() == ROLES | {"broker"} for used in found["cpu_us_at_marks"].values())
    if "valkey" in find_server():  # Redis doesn't count by connection
        assert found["traffic"].keys() == ROLES
        assert all(used["commands"] > 0 and used["bytes_out"] > 0 for used in found["traffic"].values())
        assert found["traffic"]["consumer"]["bytes_in"] > 16 * 100  # a policy's batch: ids, labels, weights, logprobs
        assert found["traffic"]["consumer"]["bytes_out"] > 8 * 100  # a result: ids and logprobs
    assert found["idle_commands_s"] > 0
    assert 100 < found["redis_bytes_per_queued_job"] < 10_000
    assert 0 < found["redis_bytes_end"] < 50 << 20
    assert 0 <= found["idle_broker_share_100_workers"] < 1
    assert (found["sequences"], found["idle_workers"], found["leased_jobs"]) == (1000, 10, 320)
    assert left_behind(tmp_path) == ["model"]
