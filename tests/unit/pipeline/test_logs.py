"""Where log lines go."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from pipeline import logs


def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("worker")
    logs.get_logger().info("one")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    logs.get_logger().info("two", n=2)
    assert "event=two n=2" in second.getvalue()
