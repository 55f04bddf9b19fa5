"""Commits finished sequences: everything that ended within a tick goes out in one script call.

While the engine's batch is full a tick lasts `TICK_S`: every call to the broker takes time from the decode thread.
Otherwise a result goes out at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.jobs import Finished, JobQueue
from pipeline.logs import get_logger

_MOST_AT_ONCE = 256
TICK_S = 0.04


class Committer:
    """Owned by one worker; `put` from its event loop."""

    def __init__(self, queue: JobQueue, busy: Callable[[], bool] = lambda: False) -> None:
        self._queue, self._busy = queue, busy
        self._pending: list[Finished] = []
        self._after: list[Callable[[], None]] = []
        self._ready = asyncio.Event()
        self._one_flush = asyncio.Lock()
        self.sequences = 0
        self.tokens = 0

    def put(self, finished: Finished) -> None:
        """Commit this one with the next tick."""
        self._pending.append(finished)
        self._ready.set()

    def when_flushed(self, call: Callable[[], None]) -> None:
        """Call once everything that was put before is committed."""
        self._after.append(call)
        self._ready.set()

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._ready.wait()
            if self._busy():
                await asyncio.sleep(TICK_S)
            await self.flush()

    async def flush(self) -> None:
        """Commit what is pending now."""
        async with self._one_flush:
            self._ready.clear()
            calls, self._after = self._after, []
            while self._pending:
                batch = self._pending[:_MOST_AT_ONCE]
                outcomes = await self._queue.commit(batch)
                del self._pending[: len(batch)]
                for item, outcome in zip(batch, outcomes, strict=True):
                    self._count(item, outcome)
            for call in calls:
                call()

    def _count(self, item: Finished, outcome: str) -> None:
        if outcome == "ok":
            self.sequences += 1
            self.tokens += len(item.result.token_ids)
        else:
            get_logger().warning("not committed", sequence=item.result.seq_id, outcome=outcome)
