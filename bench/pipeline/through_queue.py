"""The pipeline's side: the broker's queue, W real workers, the result stream, the sink.

- A round's clock runs from before the first enqueue to the arrival of the last result.
- `bytes_received` counts all that the broker's sockets took in (INFO total_net_input_bytes): jobs, claims,
  commits, heartbeats, the sink's reads and acks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis

from sluice.bench.pipeline.plan import RUN, Plan
from sluice.bench.pipeline.sink import Arrival, Sink
from sluice.bench.pipeline.stats import Sample
from sluice.bench.processes import Fleet
from sluice.pipeline.errors import BrokerError, DeadlineExceeded
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob

_START_S = 180.0
_CHUNK = 100
_AMPLE = Credit(max_in_flight=10**9, samples_per_version=10**9, max_staleness=1)


class QueuedEngines:
    """Workers on a queue."""

    def __init__(self, plan: Plan, fleet: Fleet, client: Redis, url: str, more: Sequence[str] = ()) -> None:
        """`more`: further `--set` values of these workers."""
        self._plan, self._fleet, self._client, self._url = plan, fleet, client, url
        self._overrides = [*plan.overrides(), *more]
        self._keys = Keys(RUN)
        self._queue = JobQueue(client, self._keys)
        self._sink = Sink(client, self._keys, fleet.check)

    async def start(self) -> None:
        """Start the workers and wait until each has its engine."""
        settings = [part for value in self._overrides for part in ("--set", value)]
        for _ in range(self._plan.workers):
            await self._fleet.start(sluice_command("worker", *settings), env={"REDIS_URL": self._url})
        await self._sink.open()
        until = time.monotonic() + _START_S
        while len(await self.serving()) < self._plan.workers:
            self._fleet.check()
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the workers were not ready in {_START_S:.0f} s")
            await asyncio.sleep(0.1)

    async def round(self, jobs: Sequence[DecodeJob]) -> tuple[Sample, list[Arrival]]:
        """All jobs at once."""
        started, cpu_s = time.monotonic(), self._fleet.cpu_s()
        arrivals, _ = await asyncio.gather(self._sink.collect(len(jobs)), self._enqueue(jobs))
        seconds, cpu_s = time.monotonic() - started, self._fleet.cpu_s() - cpu_s
        results = [arrival.result() for arrival in arrivals]
        tokens = {result.seq_id: list(result.token_ids) for result in results}
        return Sample(seconds, cpu_s, tokens), arrivals

    async def open_load(self, jobs: Sequence[DecodeJob], per_second: float) -> list[Arrival]:
        """Jobs that arrive at random (exponential gaps), whatever is still running."""
        collected = asyncio.create_task(self._sink.collect(len(jobs)))
        gaps = random.Random(0)
        due = time.monotonic()
        try:
            for job in jobs:
                due += gaps.expovariate(per_second)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._enqueue([job])
            return await collected
        finally:
            collected.cancel()

    async def bytes_received(self) -> int:
        """Since the broker's start."""
        facts = cast("dict[str, Any]", await cast(Any, self._client).info("stats"))
        return int(facts["total_net_input_bytes"])

    async def serving(self) -> list[dict[str, Any]]:
        """The facts of each worker that has its engine."""
        now = await snapshot(self._client, self._keys)
        return [row.facts for row in now.alive("worker") if "running" in row.facts]

    async def _enqueue(self, jobs: Sequence[DecodeJob]) -> None:
        for begin in range(0, len(jobs), _CHUNK):
            outcomes = await self._queue.enqueue(jobs[begin : begin + _CHUNK], _AMPLE)
            if set(outcomes) != {"enqueued"}:
                raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")
