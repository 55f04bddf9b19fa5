"""Threads for the steps of a task, which are the user's code and may never end.

| waits for     | unblocked by                                             |
|---------------|----------------------------------------------------------|
| a free thread | another step that ends, or `free_s`: then BusyError      |
| its own step  | the step, or `deadline_s`: then TimeoutError             |

- At most `MOST` run at a time. One that is given up keeps its place until it ends.
- Threads are daemons: a step that never ends does not keep the dashboard from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pipeline.errors import SluiceError

MOST = 2
T = TypeVar("T")


class BusyError(SluiceError):
    """Every thread runs a step of somebody else."""


class StepThreads:
    """For one event loop."""

    def __init__(self, *, free_s: float = 3.0, deadline_s: float = 10.0) -> None:
        self.free_s, self.deadline_s = free_s, deadline_s
        self._free = asyncio.Semaphore(MOST)

    async def run(self, step: Callable[[], T]) -> T:
        """What the step returns or raises. Raises BusyError and TimeoutError."""
        try:
            async with asyncio.timeout(self.free_s):
                await self._free.acquire()
        except TimeoutError:
            raise BusyError(f"{MOST} other sequences are being looked at, which takes long; try again later") from None
        running = asyncio.wrap_future(_started(step))
        running.add_done_callback(self._end)
        await asyncio.wait([running], timeout=self.deadline_s)  # does not cancel: the place is taken until the end
        if not running.done():
            raise TimeoutError
        return running.result()

    def _end(self, ended: asyncio.Future[T]) -> None:
        self._free.release()
        if not ended.cancelled():
            ended.exception()  # of a step that was given up nobody else asks


def _started(step: Callable[[], T]) -> Future[T]:
    made = Future[T]()
    made.set_running_or_notify_cancel()

    def work() -> None:
        try:
            made.set_result(step())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="task-step", daemon=True).start()
    return made
