"""The pure parts of `sluice bench scale`: what it plans, and where it takes the time."""

from __future__ import annotations

import pytest

from sluice.bench.scale import Marks, Plan
from sluice.pipeline.errors import ConfigError


def test_the_marks_of_a_million() -> None:
    found = Marks(1_000_000)
    assert (found.marks, found.span, found.batch) == ((10_000, 100_000, 1_000_000), 10_000, 500)


@pytest.mark.parametrize(("count", "workers", "idle_s"), [(999, 1, 1.0), (1000, 0, 1.0), (1000, 1, 0.0)])
def test_what_cannot_be_measured_is_refused(count: int, workers: int, idle_s: float) -> None:
    with pytest.raises(ConfigError, match="at least"):
        Plan.of(count=count, workers=workers, idle_s=idle_s)


def test_time_is_taken_between_the_looks_around_a_mark() -> None:
    marks = Marks(1000)
    assert marks.span == 10
    for trained, at in ((0, 100.0), (8, 108.0), (12, 116.0), (100, 204.0)):
        marks.saw(trained, at)
    assert marks.us_at(10) == pytest.approx(1.2e6)  # 0 at 100, 10 at 112
    assert marks.us_at(100) == pytest.approx(1e6)
    assert marks.trained == 100
