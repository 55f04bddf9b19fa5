"""Events of a job as spans of time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sluice.consumers.dashboard.jobs import WIDTH, bars, spans
from sluice.pipeline.queue.live_jobs import EventKind, JobEvent

KINDS: tuple[EventKind, ...] = ("enqueued", "claimed", "handed_back", "lost", "ended")


def event(at: float, kind: EventKind, attempt: int = 0, worker: str = "", detail: str = "") -> JobEvent:
    return JobEvent(at=at, kind=kind, attempt=attempt, worker=worker, detail=detail)


LOST = [
    event(10, "enqueued"),
    event(11, "claimed", 1, "w-1"),
    event(15, "lost", 1, "w-1", "no sign of life"),
    event(16, "claimed", 2, "w-2"),
]


def test_attempts_and_the_time_between() -> None:
    found = spans([*LOST, event(20, "ended", 2, "", "committed")], None)
    assert [(span.kind, span.took_s, span.ending) for span in found] == [
        ("waiting", 1, "claimed"), ("attempt", 4, "lost"), ("waiting", 1, "claimed"), ("attempt", 4, "ended"),
    ]  # fmt: skip
    assert [(span.attempt, span.worker, span.detail) for span in found if span.kind == "attempt"] == [
        (1, "w-1", "no sign of life"), (2, "w-2", "committed"),
    ]  # fmt: skip
    assert [span.css for span in found] == ["waiting", "lost", "waiting", "ended"]


def test_what_goes_on_ends_now() -> None:
    assert spans(LOST, 30)[-1].took_s == 14
    assert spans(LOST, 30)[-1].css == "running"
    back = spans([*LOST, event(18, "handed_back", 2, "w-2")], 30)
    assert [(span.kind, span.ending) for span in back[-2:]] == [("attempt", "handed back"), ("waiting", "")]
    assert spans([event(10, "enqueued")], 40)[0].took_s == 30


def test_an_end_that_the_log_has_lost_is_said() -> None:
    found = spans([event(1, "claimed", 3, "w"), event(5, "claimed", 4, "x")], None)
    assert [(span.attempt, span.ending) for span in found] == [(3, "not logged"), (4, "not logged")]
    assert spans([], None) == []
    assert bars([]) == []


@given(st.lists(st.tuples(st.floats(0, 1e4), st.sampled_from(KINDS)), max_size=30), st.none() | st.floats(1e4, 2e4))
def test_bars_lie_on_the_axis_in_order(drawn: list[tuple[float, EventKind]], now: float | None) -> None:
    events = [event(1.7e9 + at, kind, 1, "w") for at, kind in sorted(drawn)]
    made = bars(spans(events, None if now is None else 1.7e9 + now))
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH + 0.2 and bar.width >= 2 for bar in made)
    assert all(one.span.end <= two.span.start for one, two in itertools.pairwise(made))
