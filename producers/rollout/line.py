"""Who may run, and who waits: at most `max_running` rollouts run, `max_waiting` more wait in order."""

from __future__ import annotations

import asyncio

RETRY_AFTER_S = 5


class LineFull(Exception):
    """Nobody more can wait; ask again later."""


class Line:
    """A place in it is taken with `join`, and given back with `leave`."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.in_hand, self.running = 0, 0
        self._turns = asyncio.Semaphore(max_running)

    @property
    def waiting(self) -> int:
        """Rollouts that do not run yet."""
        return self.in_hand - self.running

    def join(self) -> None:
        """Take a place. Raises LineFull."""
        if self.in_hand >= self.max_running + self.max_waiting:
            raise LineFull
        self.in_hand += 1

    def leave(self) -> None:
        """Give the place back."""
        self.in_hand -= 1

    async def start(self) -> None:
        """Wait until it is this one's turn; `end` follows."""
        await self._turns.acquire()
        self.running += 1

    def end(self) -> None:
        """Let the next one run."""
        self.running -= 1
        self._turns.release()
