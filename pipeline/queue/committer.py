"""Commits results: everything that ended within a tick goes out in one script call.

While the engine's batch is full, a tick lasts `TICK_S`: every broker call takes time from the decode thread. It's
shorter if a caller is waiting. Otherwise a result goes out at once. Progress of running sequences goes out after the
results.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.queue.types import Called, Finished, Piece

_MOST_AT_ONCE = 256
TICK_S, ASKED_TICK_S = 0.1, 0.04


class Committer:
    """Owned by one worker; call `put` from its event loop."""

    def __init__(
        self, queue: JobQueue, busy: Callable[[], bool] = lambda: False, moved: Callable[[str], None] = lambda _: None
    ) -> None:
        """`busy`: whether commits may wait for a tick; `moved(job_id)`: progress of a running job was stored."""
        self._queue, self._busy, self._moved = queue, busy, moved
        self._pending: list[Finished | Called] = []
        self._pieces: list[Piece] = []
        self._after: list[Callable[[], None]] = []
        self._ready = asyncio.Event()
        self._asked = asyncio.Event()  # a caller is waiting for a pending result
        self._one_flush = asyncio.Lock()
        self.sequences = 0
        self.tokens = 0
        self.pieces = 0

    def put(self, ended: Finished | Called) -> None:
        """Commit this with the next tick."""
        self._pending.append(ended)
        if isinstance(ended, Called) or ended.result.reply_to:
            self._asked.set()
        self._ready.set()

    def store(self, piece: Piece) -> None:
        """Store this progress with the next tick."""
        self._pieces.append(piece)
        if piece.delta:
            self._asked.set()
        self._ready.set()

    def when_flushed(self, call: Callable[[], None]) -> None:
        """Call this once everything put before it is committed."""
        self._after.append(call)
        self._ready.set()

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._ready.wait()
            if self._busy():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S - ASKED_TICK_S):
                        await self._asked.wait()
                await asyncio.sleep(ASKED_TICK_S)
            await self.flush()

    async def flush(self) -> None:
        """Commit what is pending now."""
        async with self._one_flush:
            self._ready.clear()
            self._asked.clear()
            calls, self._after = self._after, []
            while self._pending:
                batch = self._pending[:_MOST_AT_ONCE]
                outcomes = await self._queue.commit(batch)
                del self._pending[: len(batch)]
                for item, outcome in zip(batch, outcomes, strict=True):
                    self._count(item, outcome)
            for call in calls:
                call()
            while self._pieces:
                pieces = self._pieces[:_MOST_AT_ONCE]
                outcomes = await self._queue.checkpoint(pieces)
                del self._pieces[: len(pieces)]
                for piece, outcome in zip(pieces, outcomes, strict=True):
                    if outcome == "ok":
                        self.pieces += 1
                        self._moved(piece.claim.job_id)

    def _count(self, item: Finished | Called, outcome: str) -> None:
        if outcome != "ok":
            name = item.result.seq_id if isinstance(item, Finished) else item.claim.job_id
            get_logger().warning("not committed", sequence=name, outcome=outcome)
        elif isinstance(item, Finished):
            self.sequences += 1
            self.tokens += len(item.result.token_ids)
            self._moved(item.claim.job_id)
