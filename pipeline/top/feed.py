"""Polls a run; survives a broker that goes away and state written by another release.

| waits for  | unblocked by                              |
|------------|-------------------------------------------|
| one poll   | the broker; `_LOOK_S`, shown as a problem |
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
from redis.exceptions import RedisError

from sluice.pipeline.broker import connection
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.queue.dead_letters import DeadLetters, Row
from sluice.pipeline.status.diagnosis import Verdict, verdict
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.rates import Rates
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.wire.keys import Keys

LETTERS = 50
AWAY, UNREADABLE = "no answer from the broker", "the run's state cannot be read"
_LOOK_S = 4.0
_HASTY_S = 1.5
_LOOKS = 6  # polls that decide whether the run moves


@dataclass
class View:
    """The current state; `now` is None before the first answer."""

    run: str
    now: Snapshot | None = None
    verdict: Verdict | None = None
    rates: Rates = field(default_factory=Rates)
    letters: list[Row] = field(default_factory=list[Row])  # newest first
    trouble: str = AWAY  # AWAY or UNREADABLE, while there is a problem
    problem: str = ""  # why there is no answer, empty if there is one
    silent_since: float | None = None  # Unix s


class Feed:
    """One connection; `close` it."""

    def __init__(self, config: Config) -> None:
        settings = msgspec.structs.replace(
            config.broker, retry_for_s=_HASTY_S, socket_timeout_s=_HASTY_S, connect_timeout_s=_HASTY_S
        )
        self._config = msgspec.structs.replace(config, broker=settings)
        self._client = connection.connect(settings, config.run)
        self._letters = DeadLetters(self._client, self._config)
        self._seen: deque[Snapshot] = deque(maxlen=_LOOKS)
        self.view = View(config.run)

    async def look(self) -> View:
        """The newest state; never raises if the broker is away or something is unreadable."""
        view = self.view
        try:
            async with asyncio.timeout(_LOOK_S):
                now = await inspect(
                    self._client, Keys(self._config.run), self._config.consumer.count, run_directory(self._config)
                )
                view.letters = await self._letters.newest(count=LETTERS) if now.dead_letters else []
        except (RedisError, BrokerError, OSError, TimeoutError) as error:
            return self._trouble(AWAY, str(error) or f"no answer within {_LOOK_S:g} s")
        except (SluiceError, msgspec.MsgspecError) as error:  # written by another release, or by a foreign program
            return self._trouble(UNREADABLE, str(error))
        view.problem, view.silent_since = "", None
        self._seen.append(now)
        view.verdict = verdict(self._seen[0], now)
        view.now = now
        view.rates.add(now)
        return view

    def _trouble(self, trouble: str, problem: str) -> View:
        view = self.view
        if trouble != view.trouble or view.silent_since is None:
            view.trouble, view.silent_since = trouble, time.time()
        view.problem = problem
        return view

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()
