"""What of a trainer's answer says when to ask again, and where a rollout is closed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from yarl import URL

from sluice.producers.agents.trainer_client import _segment, retry_after_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("3", 3), (" 3 ", 3), ("-3", 0), ("1.5", 0), ("soon", 0), ("", 0), ("9" * 400, 999_999_999), ("²", 0)],
)
def test_retry_after_in_seconds(value: str | None, seconds: float) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    later = datetime.now(UTC) + timedelta(seconds=100)
    assert 95 < retry_after_s(format_datetime(later, usegmt=True)) <= 100
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@pytest.mark.parametrize("rollout_id", ["a/b", "..", ".", "a b?c#d", "é%2F", "run:1f:0"])
def test_an_id_is_one_segment_of_the_path(rollout_id: str) -> None:
    url = URL(f"http://h/v1/rollout/{_segment(rollout_id)}/finish", encoded=True)
    assert url.raw_path.count("/") == 4
    assert URL(str(url)).raw_parts[-1] == "finish"
    assert not url.query_string
