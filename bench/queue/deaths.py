"""What two SIGKILLs cost: jobs of a second each, under a supervisor that starts dead workers again, with and without.

- Both kills hit the worker that holds the most jobs, half a job's time after it took them; the second one meets the
  jobs that the first one freed, so all of them are suspects then.
- `start_s`: from the start of a worker process to its first heartbeat, the longest of them.
- The aim, `limit_s`: twice the time without kills and one worker's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.bench.queue.in_flight import in_flight
from sluice.bench.queue.mortal import config_of
from sluice.bench.queue.plan import Plan
from sluice.bench.report import say
from sluice.pipeline.config.types import Config, UpConfig
from sluice.pipeline.errors import BrokerError, DeadlineExceeded
from sluice.pipeline.queue import Call, JobQueue
from sluice.pipeline.run.stack import Deaths
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys

_KILLS = 2
_CHUNK = 100
_LOOK_S = 0.01
_DEADLINE_S = 180.0
_BACKOFF = UpConfig(restart_backoff_s=0.1)


@dataclass
class _Fleet:
    """Workers under their supervisor, on a run of their own."""

    client: Any
    config: Config
    supervisor: Supervisor
    start_s: float

    async def holders(self) -> Counter[str]:
        """Jobs by the worker that holds them."""
        keys = Keys(self.config.run)
        pipe = self.client.pipeline(transaction=False)
        for job_id in await self.client.zrange(keys.leases, 0, -1):
            pipe.hget(keys.job_state.encode() + job_id, "worker")
        return Counter(name.decode() for name in await pipe.execute() if name)

    async def kill_the_busiest(self, after_s: float) -> None:
        """From outside: nobody announces it."""
        await _until(self.holders, "a worker that holds jobs")
        await asyncio.sleep(after_s)
        [(name, _)] = (await self.holders()).most_common(1)
        if pid := self.supervisor.children[name].pid:
            os.kill(pid, signal.SIGKILL)

        async def gone() -> bool:
            return name not in await self.holders()

        await _until(gone, f"the leases of {name} to end")


async def deaths(plan: Plan, client: Any, url: str, home: Path) -> dict[str, Any]:
    """Seconds, by workers."""
    found: dict[str, dict[str, float]] = {}
    for workers in plan.death_workers:
        quiet_s, start_s = await _round(plan, client, url, home, workers, kills=0)
        killed_s, again_s = await _round(plan, client, url, home, workers, kills=_KILLS)
        start_s = max(start_s, again_s)
        limit_s = 2 * quiet_s + start_s
        found[str(workers)] = {"quiet_s": quiet_s, "killed_s": killed_s, "start_s": start_s, "limit_s": limit_s}
        say(
            f"{plan.death_jobs} jobs of {plan.death_job_s:g} s, {workers} workers: {quiet_s:.2f} s; with {_KILLS} "
            f"kills {killed_s:.2f} s (aim {limit_s:.2f} s, a worker's start {start_s:.2f} s)"
        )
    return {"deaths": found, "deaths_jobs": plan.death_jobs, "deaths_job_s": plan.death_job_s, "deaths_kills": _KILLS}


async def _round(plan: Plan, client: Any, url: str, home: Path, workers: int, *, kills: int) -> tuple[float, float]:
    """From the first enqueue to the last job's end, and how long a worker takes to start."""
    config = config_of(url, f"deaths-{workers}-{kills}")
    async with _fleet(client, config, home, workers) as fleet:
        started = time.perf_counter()
        queue = JobQueue(client, Keys(config.run))
        calls = [
            Call(job_id=f"{config.run}:{number}", function="last", args=(plan.death_job_s,))
            for number in range(plan.death_jobs)
        ]
        await in_flight(_send(queue, calls[begin : begin + _CHUNK]) for begin in range(0, len(calls), _CHUNK))
        for _ in range(kills):
            await fleet.kill_the_busiest(plan.death_job_s / 2)

        async def over() -> bool:
            return int(await client.hget(Keys(config.run).counts, "called") or 0) >= plan.death_jobs

        await _until(over, f"{plan.death_jobs} jobs to end")
        return time.perf_counter() - started, fleet.start_s


@contextlib.asynccontextmanager
async def _fleet(client: Any, config: Config, home: Path, workers: int) -> AsyncGenerator[_Fleet]:
    env = {**os.environ, "REDIS_URL": config.broker.url or ""}
    supervisor = Supervisor(_BACKOFF, home / config.run, env, Deaths(client, config).settle)
    for number in range(workers):
        supervisor.add(f"worker-{number}", [sys.executable, "-m", "sluice.bench.queue.mortal", config.run])
    began = time.perf_counter()

    async def up() -> bool:
        return len((await snapshot(client, Keys(config.run))).alive("worker")) == workers

    task = asyncio.create_task(supervisor.run())
    try:
        await _until(up, f"{workers} workers to start")
        yield _Fleet(client, config, supervisor, time.perf_counter() - began)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await supervisor.stop()


async def _until(holds: Callable[[], Awaitable[Any]], cause: str) -> None:
    until = time.perf_counter() + _DEADLINE_S
    while not await holds():
        if time.perf_counter() > until:
            raise DeadlineExceeded(f"waited {_DEADLINE_S:.0f} s for {cause}")
        await asyncio.sleep(_LOOK_S)


async def _send(queue: JobQueue, calls: list[Call]) -> None:
    if set(outcomes := await queue.enqueue_calls(calls)) != {"enqueued"}:
        raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")
