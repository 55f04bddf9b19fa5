"""Where log lines go."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from sluice.pipeline import logs


def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("worker")
    logs.get_logger().info("one")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    logs.get_logger().info("two", n=2)
    assert "event=two n=2" in second.getvalue()


def test_a_value_neither_ends_its_line_nor_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway")
    logs.get_logger().warning("refused", rollout="a\r\nlevel=info\x1b[2J\x9b\u2028\u202e\x00b", why=ValueError("x\x07"))
    [line] = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable()
    assert r"a\\r\nlevel=info\\x1b[2J\\x9b\\u2028\\u202e\\x00b" in line
    assert r"why=x\x07" in line
