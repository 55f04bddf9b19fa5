"""`sluice bench elastic`: which tokens count as sampled again; then a small run with real workers that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.bench.elastic import Member, Plan, redone
from sluice.bench.processes import Fleet
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue.live_jobs import JobEvent
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from tests.benches import left_behind, run_bench
from tests.factories import sequence_result


def result(resumed: int = 0) -> SequenceResult:
    """200 tokens; those that weren't resumed in 2 s."""
    columns = SampledTokens([7] * 200, [-1.0] * 200, [0] * 200, [1] * 200).columns()
    return sequence_result("a", attempt=2, resumed_tokens=resumed, timings={"decode_s": 2.0}, **columns)


def events(kind: Any, at: float) -> list[JobEvent]:
    """Claimed at 100."""
    return [
        JobEvent(at=99.0, kind="enqueued"),
        JobEvent(at=100.0, kind="claimed", attempt=1, worker="w-0"),
        JobEvent(at=at, kind=kind, attempt=1, worker="w-0"),
        JobEvent(at=at, kind="claimed", attempt=2, worker="w-1"),
    ]


def gone(ending: float, killed: float | None = None) -> dict[str, Member]:
    return {"w-0": Member("w-0", Fleet("w", Path()), ending, killed)}


@pytest.mark.parametrize(
    ("resumed", "killed_at", "expected"),
    [
        (0, 100.3, 30.0),  # 0.3 s at 100 tokens/s
        (0, 102.0, 64.0),  # more would have been stored
        (64, 102.0, 32.0),  # stored, and half of the next piece at the mean
    ],
)
def test_of_a_killed_worker_what_it_had_not_stored_is_sampled_again(
    resumed: int, killed_at: float, expected: float
) -> None:
    found = list(redone(result(resumed), events("lost", 116.0), gone(killed_at, killed_at)))
    assert found == [pytest.approx(expected)]


def test_a_job_that_was_handed_back_unstarted_loses_nothing() -> None:
    assert list(redone(result(), events("handed_back", 100.4), gone(100.3))) == []
    assert list(redone(result(), events("handed_back", 120.4), gone(100.3))) == [64.0]
    assert list(redone(result(), events("lost", 120.0), {})) == []


def test_replacements_are_spread_over_the_window() -> None:
    assert Plan.of().replacements * Plan.of().rounds == 8
    assert Plan.of(quick=True).replacements == 2


def test_small_with_one_worker_that_is_replaced_twice(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "elastic", "--quick")
    assert (found["lost"], found["twice"], found["replaced"]) == (0, 0, 2)
    assert found["ends"] == {"SIGTERM": 1, "SIGKILL": 1}
    assert found["rate_share"] > 0
    assert 0 <= found["redone_share"] <= found["redone_share_most"] < 1
    for parts, total in (
        (found["new_worker_alone_parts"]["hf"], found["new_worker_alone_s"]["hf"]),
        (found["new_worker_parts"], found["new_worker_s"]),
    ):
        assert list(parts) == ["command", "connect", "import", "load", "prompts", "weights", "claim", "first_token"]
        assert 0 < parts["import"] < total
    assert left_behind(tmp_path) == ["engine"]


def test_a_window_without_a_replacement_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--window-s 120 with --workers 2 is less than --life-s 300"):
        Plan(life_s=300.0)
