"""A clock that a test sets forward: a limit is over when the test says so, and no stall comes near it."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest

LIMIT_S = 60.0  # far less than the deadlines of the test itself (tests/deadlines.py), which see the same clock


def skip(monkeypatch: pytest.MonkeyPatch, seconds: float = LIMIT_S + 1.0) -> None:
    """Let so much time pass for all that waits by `time.monotonic`, as the event loop does.

    A limit needs a second more than it has: aiohttp rounds up.
    """
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


class Ahead:
    """The `time` of one module, which may be set forward again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.by_s = 0.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
