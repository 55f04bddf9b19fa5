"""Who is in vLLM's core, who waits to be sent, and the pause in which weights are loaded.

- A sequence is sent any number of times: a pause takes it out of the core, with the tokens that it has, and sends the
  rest again. All tokens of one sending belong to one version.
- Everything happens on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

_ids = itertools.count()


class Entry:
    """One call; `request_id` is None unless vLLM has it."""

    __slots__ = ("aborted", "interrupted", "pausable", "request_id", "reserved", "seq_key")

    def __init__(self, seq_key: str, *, pausable: bool) -> None:
        self.seq_key = seq_key
        self.pausable = pausable  # what it has is kept when it is taken out
        self.request_id: str | None = None
        self.reserved: tuple[int, float] | None = None  # (token, logprob): the repeat guard's id came
        self.aborted = False
        self.interrupted = False  # taken out of the core for a pause


class Entries:
    """All calls of one engine; `abort` takes requests out of the core, with what they have."""

    def __init__(
        self, abort: Callable[[list[str]], Awaitable[None]], or_dead: Callable[[Awaitable[None]], Awaitable[None]]
    ) -> None:
        """`or_dead` waits no longer than the core lives."""
        self._abort, self._or_dead = abort, or_dead
        self._entries: set[Entry] = set()
        self._changed = asyncio.Condition()
        self._paused = False
        self._progress = time.monotonic()

    def progress(self) -> float:
        """Monotonic seconds of the newest `beat`; of now while nothing runs, or in a pause, which has its own limit."""
        return self._progress if self._entries and not self._paused else time.monotonic()

    def beat(self) -> None:
        """The core gave something."""
        self._progress = time.monotonic()

    @contextlib.asynccontextmanager
    async def entered(self, seq_key: str, *, pausable: bool = False) -> AsyncIterator[Entry]:
        """An entry that an abort can find."""
        if not self._entries:
            self.beat()
        entry = Entry(seq_key, pausable=pausable)
        self._entries.add(entry)
        try:
            yield entry
        finally:
            self._entries.discard(entry)

    async def admitted(self, entry: Entry) -> None:
        """Return when it may be sent, or was aborted in a pause; send it without a wait."""
        if self._paused:
            async with self._changed:
                await self._changed.wait_for(lambda: entry.aborted or not self._paused)

    @contextlib.asynccontextmanager
    async def sent(self, entry: Entry) -> AsyncIterator[str]:
        """The time in which the core has it, under the id that this gives; a pause begins after it."""
        entry.request_id, entry.interrupted = f"sluice-{next(_ids)}", False
        try:
            yield entry.request_id
        finally:
            entry.request_id = None
            if self._paused:
                async with self._changed:
                    self._changed.notify_all()

    async def abort(self, seq_key: str) -> None:
        """End those of this key; one that is not here is no error."""
        found = [entry for entry in self._entries if entry.seq_key == seq_key]
        for entry in found:
            entry.aborted = True
        await self._take_out(found)
        async with self._changed:
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """A time in which the core has nothing: sequences are taken out of it, and nothing is sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._paused)
            self._paused = True
        try:
            pausable = [entry for entry in self._entries if entry.pausable and entry.request_id is not None]
            for entry in pausable:
                entry.interrupted = True
            await self._take_out(pausable)
            await self._or_dead(self._nothing_sent())
            yield
        finally:
            self._paused = False
            self.beat()
            async with self._changed:
                self._changed.notify_all()

    async def _nothing_sent(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(entry.request_id is None for entry in self._entries))

    async def _take_out(self, entries: list[Entry]) -> None:
        sent = [entry.request_id for entry in entries if entry.request_id is not None]
        if sent:
            await self._abort(sent)
