"""The systems that race: each fills its queue, and runs a number of worker processes of its own kind.

| system | worker processes                            | ended when                                        |
|--------|---------------------------------------------|---------------------------------------------------|
| ours   | ArqWorker                                | the queue is empty, and as many calls are counted |
| arq    | arq's command, its serialiser, its defaults | the queue is empty (a job leaves it at its end)   |
| saq    | SAQ's command, its defaults                 | nothing is incomplete                             |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from redis.asyncio import Redis

from sluice.bench.processes import Fleet
from sluice.bench.queue import stock_saq
from sluice.bench.queue.in_flight import in_flight
from sluice.bench.queue.plan import Settings
from sluice.bench.queue.worker import Totals, broker_config
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import Call, JobQueue, arq_pool
from sluice.pipeline.wire.keys import Keys

_START_S = 60.0
_ARQ_QUEUE = "arq:queue"
_CHUNK = 100
_PAGE = 2000
_ENQUEUES = 20  # of a foreign client, at a time


class System:
    """One system on its broker."""

    leftovers: ClassVar[str]  # keys that ended jobs leave behind

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        self.url, self.settings = url, settings or {}
        self.client = connect(broker_config(url))
        self.filled = 0

    async def close(self) -> None:
        """End its connections."""
        await self.client.aclose()

    def command(self, worker: int) -> list[str]:
        """What starts one worker."""
        raise NotImplementedError

    async def enqueue(self, count: int) -> None:
        """That many jobs."""
        raise NotImplementedError

    async def is_empty(self) -> bool:
        """Whether every job has ended."""
        raise NotImplementedError

    async def start(self, workers: int, fleet: Fleet) -> None:
        """Start workers, and pause them once they are up."""
        env = {"REDIS_URL": self.url, "BENCH_SETTINGS": json.dumps(self.settings)}
        for worker in range(workers):
            await fleet.start([sys.executable, "-m", *self.command(worker)], env, piped=True)
        await fleet.answers(_START_S)
        fleet.pause()

    async def broker_s(self) -> float:
        """Processor seconds that the broker has used so far (user and system)."""
        facts = await self.client.info("cpu")
        return facts["used_cpu_user"] + facts["used_cpu_sys"]

    async def fill(self, count: int) -> None:
        """Enqueue jobs; what ended ones left behind goes first."""
        await delete(self.client, self.leftovers)
        await self.enqueue(count)
        self.filled += count


class Ours(System):
    """The leased queue, as a run of its own: nothing of another one is in its way."""

    leftovers = "arq:result:*"

    def __init__(self, url: str, run: str) -> None:
        super().__init__(url)
        self._keys = Keys(run)
        self._queue = JobQueue(self.client, self._keys)

    def command(self, worker: int) -> list[str]:
        return ["sluice.bench.queue.worker", f"worker-{worker}", self._keys.run]

    async def enqueue(self, count: int) -> None:
        calls = [Call(job_id=f"{self._keys.run}:{self.filled + i}", function="noop") for i in range(count)]
        await in_flight(self._send(calls[begin : begin + _CHUNK]) for begin in range(0, count, _CHUNK))

    async def is_empty(self) -> bool:
        pipe: Any = self.client.pipeline(transaction=False)
        pipe.zcard(self._keys.jobs).hget(self._keys.counts, "called")
        left, called = await pipe.execute()
        return not left and int(called or 0) == self.filled

    async def totals(self, fleet: Fleet) -> list[Totals]:
        """End the workers; what each did."""
        await fleet.end()
        return [msgspec.json.decode(line, type=Totals) for line in await fleet.answers(_START_S)]

    async def _send(self, calls: Sequence[Call]) -> None:
        if set(outcomes := await self._queue.enqueue_calls(calls)) != {"enqueued"}:
            raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")


class Arq(System):
    """Stock arq; with other settings than its defaults it does not log each job either."""

    leftovers = "arq:result:*"

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        super().__init__(url, settings)
        self._pool = arq_pool(self.client, _ARQ_QUEUE)
        self._pool.job_serializer = self._pool.job_deserializer = None  # its own

    def command(self, worker: int) -> list[str]:
        quiet = ["--custom-log-dict", "sluice.bench.queue.stock_arq.quiet"] if self.settings else []
        return ["arq", "sluice.bench.queue.stock_arq.settings", *quiet]

    async def enqueue(self, count: int) -> None:
        await in_flight((self._pool.enqueue_job("noop") for _ in range(count)), _ENQUEUES)

    async def is_empty(self) -> bool:
        return not await self.client.zcard(_ARQ_QUEUE)


class Saq(System):
    """Stock SAQ."""

    leftovers = "saq:job:*"

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        super().__init__(url, settings)
        self._queue = stock_saq.saq_queue(url)

    def command(self, worker: int) -> list[str]:
        return ["saq", "sluice.bench.queue.stock_saq.settings"]

    async def enqueue(self, count: int) -> None:
        await in_flight((self._queue.enqueue("noop") for _ in range(count)), _ENQUEUES)

    async def close(self) -> None:
        await self._queue.disconnect()
        await super().close()

    async def is_empty(self) -> bool:
        return not await self._queue.count("incomplete")


async def delete(client: Redis, pattern: str) -> None:
    """Every key that matches."""
    cursor: int = 0
    while True:
        cursor, found = await client.scan(cursor, match=pattern, count=_PAGE)
        if found:
            await client.unlink(*found)
        if not cursor:
            return
