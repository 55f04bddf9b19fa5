"""The null sink: reads results, acks and deletes them as a consumer does, and keeps what it saw.

Results are decoded after the clock has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from sluice.pipeline.broker.streams import result_reader
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult, decode

_PAGE = 64
_BLOCK_MS = 500


@dataclass(frozen=True)
class Arrival:
    """One result as it came in; `at` is Unix seconds."""

    at: float
    raw: bytes

    def result(self) -> SequenceResult:
        """The message."""
        return decode(SequenceResult, self.raw)


class Sink:
    """The only reader of the run's one partition."""

    def __init__(self, client: Redis, keys: Keys, check: Callable[[], None]) -> None:
        self._client = client
        self._reader = result_reader(client, keys, 0, "sink")
        self._check = check

    async def open(self) -> None:
        """Make the consumer group."""
        await self._reader.open()

    async def collect(self, count: int, idle_s: float = 120.0) -> list[Arrival]:
        """The next `count` results; DeadlineExceeded when none comes for `idle_s`."""
        found: list[Arrival] = []
        last = time.monotonic()
        while len(found) < count:
            entries = await self._reader.read(_PAGE, _BLOCK_MS)
            at = time.time()
            if entries:
                last = time.monotonic()
                found += [Arrival(at, entry.fields[b"r"]) for entry in entries]
                await self._remove([entry.entry_id for entry in entries])
            elif time.monotonic() - last > idle_s:
                raise DeadlineExceeded(f"no result for {idle_s:.0f} s; {len(found)} of {count} arrived")
            self._check()
        return found

    async def _remove(self, entry_ids: list[str]) -> None:
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.xack(self._reader.stream, self._reader.group, *entry_ids)
        pipe.xdel(self._reader.stream, *entry_ids)
        await pipe.execute()
