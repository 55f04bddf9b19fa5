"""Wakes an idle worker the moment a job comes: a blocking pop on the run's wake list.

- Listens only while its worker is idle: a busy one would take the signal from one that sleeps.
- Jobs of arq's own enqueue_job, deferred ones and leases that run out ring no bell: one worker polls for them, and the
  others find out within `_WATCH_POLLS` polls when it is gone (watch.lua).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import Redis

_BLOCK_S = 5.0


class Waker:
    """`rang` is set by a signal; `listen` while there is nothing to do."""

    def __init__(self, client: Redis, key: str, rang: asyncio.Event, socket_timeout_s: float) -> None:
        self._client, self._key, self._rang = client, key, rang
        self._block_s = min(_BLOCK_S, socket_timeout_s / 2)  # or each wait would look like an outage
        self._idle = asyncio.Event()

    def listen(self, idle: bool) -> None:
        """Whether this worker sleeps."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def run(self) -> None:
        """Pass signals on until cancelled."""
        while True:
            await self._idle.wait()
            pop = cast(Any, self._client).blpop([self._key], timeout=self._block_s)
            if await cast("Awaitable[Any]", pop):
                self._rang.set()
                self._idle.clear()
