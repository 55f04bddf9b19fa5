"""Looks at a run again and again while its processes are supervised, to its end or to a stop.

| waits for                  | unblocked by                                              |
|----------------------------|-----------------------------------------------------------|
| the next look              | 0.25 s, a stop, a child that cannot be kept running       |
| the broker, within a look  | the broker; a stop; `broker.retry_for_s`                  |

- A stop takes effect at once, also while the broker is away; no child outlives `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import broker as connections
from pipeline.config.types import Config
from pipeline.errors import BrokerError
from pipeline.keys import Keys
from pipeline.logs import get_logger
from pipeline.progress import Progress
from pipeline.status import Snapshot, snapshot
from pipeline.supervise import Supervisor

Watch = Callable[[Snapshot, Supervisor, Progress], Awaitable[None]]
Task = asyncio.Task[Any]
_LOOK_S = 0.25
_SAY_AFTER_S = 3.0
_CANCEL_AGAIN_S = 0.5
_ASK_S = 1.0
_LAST_LOOK_S = 5.0
_GONE_GRACE_S = 5.0


class Watchman:
    """One run's; `watch` is called with every snapshot."""

    def __init__(
        self, client: Redis, config: Config, supervisor: Supervisor, progress: Progress, watch: Watch | None
    ) -> None:
        self._client, self._config, self._keys = client, config, Keys(config.run)
        self._supervisor, self._progress, self._watch = supervisor, progress, watch
        self.stop = asyncio.Event()
        self._seen: Snapshot | None = None

    async def run(self) -> Snapshot | None:
        """To the trainer's end or the stop; the final state, or None when the broker is gone at a stop.

        All children have ended then, however this ends. A trainer that is not ours ends with the run.
        """
        asked = asyncio.create_task(self.stop.wait())
        care = asyncio.create_task(self._first_then_care())
        try:
            while not self._done and await self._beside(self._look(), asked, care):
                await asyncio.wait({asked, care}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            await _end(care)
            await self._supervisor.stop(self._grace_s)
            if await self._beside(self._see(), asked):
                return self._seen
            return await self._last_look() if await answers(self._config) else None
        finally:
            await _end(asked)
            await _end(care)
            await self._supervisor.stop(self._grace_s)

    async def _last_look(self) -> Snapshot | None:
        with contextlib.suppress(TimeoutError, RedisError, OSError):
            return await asyncio.wait_for(snapshot(self._client, self._keys), _LAST_LOOK_S)
        return None

    @property
    def _done(self) -> bool:
        children, now = self._supervisor.children, self._seen
        if "trainer" in children:
            return children["trainer"].done
        if now is None or not (children["producer"].done and now.complete):
            return False
        return not now.alive("trainer")  # it has its last words to say, perhaps to a broker of ours

    async def _first_then_care(self) -> None:
        # The producer says anew when it has come to its end.
        await cast(Any, self._client).hset(self._keys.source, "exhausted", "0")
        await self._supervisor.run()

    async def _look(self) -> None:
        producer = self._supervisor.children["producer"]
        had_ended = producer.done  # asked first: it says that it came to the end before it goes
        now = await self._see()
        if had_ended and not now.exhausted:
            get_logger().warning("the broker lost its newest part; the producer goes over its rows again")
            self._supervisor.start_again(producer.name)
        if self._watch:
            await self._watch(now, self._supervisor, self._progress)

    async def _see(self) -> Snapshot:
        now = self._seen = await snapshot(self._client, self._keys)
        self._progress.update(now)
        return now

    async def _beside(self, work: Coroutine[Any, Any, Any], asked: Task, *others: Task) -> bool:
        """Await `work`; False when a stop is asked for first. Raises what ended one of the others."""
        task, said = asyncio.create_task(work), False
        try:
            while not task.done() and not asked.done():
                await asyncio.wait({task, asked, *others}, timeout=_SAY_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                for other in others:
                    if other.done():
                        other.result()
                if not (said or task.done() or asked.done()):
                    said = True
                    patience = f"{self._config.broker.retry_for_s:.0f} s"
                    self._progress.say(f"the broker does not answer; waiting for it for up to {patience}")
            if task.done():
                task.result()
            return not asked.done()
        finally:
            await _end(task)

    async def _grace_s(self) -> float:
        """How long the children may take: without a broker they have nobody to hand their work to."""
        if self._done or await answers(self._config):
            return self._config.up.stop_grace_s
        return min(_GONE_GRACE_S, self._config.up.stop_grace_s)


async def answers(config: Config) -> bool:
    """Whether the broker can be reached within about a second."""
    hasty = msgspec.structs.replace(
        config.broker, retry_for_s=_ASK_S, socket_timeout_s=_ASK_S, connect_timeout_s=_ASK_S
    )
    try:
        await connections.wait_ready(hasty, config.run)
    except BrokerError:
        return False
    return True


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel until it is gone; see Role.end_background. Its error was raised before or does not matter any more."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()
