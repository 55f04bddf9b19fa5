"""The run's newest state, rates and history, for the pages.

| waits for         | unblocked by                                                                  |
|-------------------|-------------------------------------------------------------------------------|
| the next snapshot | a second                                                                      |
| the broker        | the broker, or `_INSPECT_S`: the pages then show the last snapshot, and why   |

- One task inspects the run (`Monitor.run`); pages and streams read its results.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import msgspec
from fastapi import Request
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.rates import Rates
from sluice.pipeline.status.snapshot import Process, Snapshot
from sluice.pipeline.status.stages import Stage, stages
from sluice.pipeline.wire.keys import Keys

EVERY_S = 1.0
_INSPECT_S = 3.0
_ASK_S = 5.0
_AWAY = "the broker does not answer"
T = TypeVar("T")
_WINDOW = 16  # heartbeats


class Monitor:
    """The newest snapshot of one run, plus queries that a page may make."""

    def __init__(self, config: Config, client: Redis, reader: HistoryReader) -> None:
        self.config, self.client, self.keys = config, client, Keys(config.run)
        self.reader, self.rates, self.process_rates = reader, Rates(), ProcessRates()
        self.newest = Snapshot(run=config.run, state="new")  # until the first one
        self.seen_at: float | None = None  # Unix time of that snapshot, in seconds
        self.problem: str | None = None  # why `newest` is out of date
        self.number = 0  # number of attempts, failed ones included
        self.closing = asyncio.Event()
        self._next = asyncio.Event()

    async def refresh(self) -> None:
        """Take one snapshot; never raises if the broker is away."""
        try:
            async with asyncio.timeout(_INSPECT_S):
                self.newest = await inspect(self.client, self.keys, self.config.consumer.count)
            self.rates.add(self.newest)
            self.process_rates.add(self.newest.processes)
            self.seen_at, self.problem = time.time(), None
        except (RedisError, OSError, TimeoutError) as error:
            self._is_old(_AWAY, error)
        except (SluiceError, msgspec.MsgspecError) as error:  # written by another release, or by a foreign program
            self._is_old("the run's state cannot be read", error)
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    def _is_old(self, problem: str, error: Exception) -> None:
        if self.problem is None:
            get_logger().warning(problem, error=repr(error))
        self.problem = problem

    async def run(self) -> None:
        """Inspect once a second until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(EVERY_S)

    async def next(self) -> None:
        """Wait for the next snapshot, or the end."""
        if not self.closing.is_set():
            await self._next.wait()

    def close(self) -> None:
        """End all streams."""
        self.closing.set()
        self._next.set()

    def stages(self) -> list[Stage]:
        """The flow, from the producer to the trainer."""
        return stages(self.newest, self.rates)

    async def ask(self, question: Awaitable[T]) -> T:
        """Await a page's broker query; raises BrokerError if it takes too long."""
        try:
            async with asyncio.timeout(_ASK_S):
                return await question
        except TimeoutError as error:
            raise BrokerError(f"{_AWAY} within {_ASK_S:g} s; check that it runs (`sluice doctor`)") from error


def monitor_of(request: Request) -> Monitor:
    return request.app.state.monitor


class ProcessRates:
    """`add` every snapshot; a restarted worker starts over."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def add(self, rows: Iterable[Process]) -> None:
        """Add the newest snapshot's processes; forget those that are gone."""
        counted = {(row.name, row.pid): row for row in rows if row.is_alive and row.facts.get("tokens") is not None}
        self._seen = {key: self._seen.get(key, deque(maxlen=_WINDOW)) for key in counted}
        for key, row in counted.items():
            beats = self._seen[key]
            if not beats or row.at > beats[-1][0]:
                beats.append((row.at, row.facts["tokens"]))

    def tokens_per_s(self, row: Process) -> float | None:
        """None if the process doesn't count tokens, or was seen only once."""
        beats = self._seen.get((row.name, row.pid), ())
        if len(beats) < 2:
            return None
        (first_at, first), (last_at, last) = beats[0], beats[-1]
        return (last - first) / (last_at - first_at)
