"""Finds what blocks the event loop: a thread pings the loop, and names the running code if there is no answer.

- A coroutine that computes, or blocks without `await`, holds up everything; nothing inside the loop can report it.
- It is identified by its task and its current line in our code or the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import sysconfig
import threading
import time
from collections.abc import Generator
from types import FrameType

from sluice.pipeline.logs import get_logger

_LIMIT_S = 1.0
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")


@contextlib.contextmanager
def watch_loop(limit_s: float = _LIMIT_S) -> Generator[LoopWatch]:
    """Watch the running loop while the block runs."""
    watch = LoopWatch(asyncio.get_running_loop(), limit_s)
    watch.thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()


class LoopWatch:
    """`blocked` counts how often the loop didn't respond for `limit_s`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.blocked = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._loop, self._limit_s, self._owner = loop, limit_s, threading.get_ident()

    def _watch(self) -> None:
        while not self.stop.wait(self._limit_s / 2):
            sign, asked = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(sign.set)
            except RuntimeError:  # it is closed
                return
            if sign.wait(self._limit_s):
                continue
            self.blocked += 1
            task, at = self._task(), _place(sys._current_frames().get(self._owner))  # pyright: ignore[reportPrivateUsage]
            get_logger().warning("the event loop is blocked", task=task, at=at)
            while not sign.wait(self._limit_s):
                if self.stop.is_set():
                    return
            get_logger().warning(
                "the event loop is running again", task=task, blocked_s=round(time.monotonic() - asked, 2)
            )

    def _task(self) -> str:
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:  # it changed meanwhile
            return "-"
        return "-" if task is None else task.get_name()


def _place(frame: FrameType | None) -> str:
    """The innermost line outside the standard library."""
    found = frame
    while found is not None and found.f_code.co_filename.startswith(_STANDARD) and _is_library(found):
        found = found.f_back
    found = found or frame
    if found is None:
        return "-"
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return "site-packages" not in frame.f_code.co_filename
