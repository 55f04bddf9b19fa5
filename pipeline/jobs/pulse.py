"""A worker's background tasks, and the sign of life of its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any


class Pulse:
    """`beaten` is the monotonic time of the loop's last turn: a loop that hangs stops beating."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.beaten = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *background: Coroutine[Any, Any, None]) -> None:
        """Run these until `end`."""
        self.beaten = time.monotonic()
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in (*background, self._beat())]

    def check(self) -> None:
        """Raise the error of a task that has ended."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        """Cancel the tasks until they are gone (Python 3.11 may swallow a cancellation)."""
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)

    async def _beat(self) -> None:
        while True:
            self.beaten = time.monotonic()
            await asyncio.sleep(self._every_s)
