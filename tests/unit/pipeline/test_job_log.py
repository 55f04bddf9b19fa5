"""A job's log as bytes → events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.queue.live_jobs import JobEvent, parse_log

LINES = b"1500\te\t0\t\t\n2500\tc\t1\tw-1\t\n3000\tl\t1\tw-1\tits lease ran out\n4000\tx\t2\t\tcommitted\n"


def test_lines_become_events() -> None:
    assert parse_log(LINES) == [
        JobEvent(at=1.5, kind="enqueued"),
        JobEvent(at=2.5, kind="claimed", attempt=1, worker="w-1"),
        JobEvent(at=3.0, kind="lost", attempt=1, worker="w-1", detail="its lease ran out"),
        JobEvent(at=4.0, kind="ended", attempt=2, detail="committed"),
    ]


def test_what_cannot_be_read_is_left_out() -> None:
    assert parse_log(b"") == []
    assert parse_log(b"w-1\t\n" + LINES + b"junk\n1\tz\t0\t\t\n\xff\xfe\tc\t1\tw\t\n1\tc\tx\tw\xff\t\n") == [
        *parse_log(LINES),
        JobEvent(at=0.001, kind="claimed", worker="w\N{REPLACEMENT CHARACTER}"),
    ]


@given(st.binary(max_size=200))
def test_no_bytes_are_an_error(raw: bytes) -> None:
    assert isinstance(parse_log(LINES + raw + b"\n" + LINES), list)
    assert parse_log(LINES + raw + b"\n" + LINES)[:3] == parse_log(LINES)[:3]
