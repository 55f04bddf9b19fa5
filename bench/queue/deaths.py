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
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from sluice.bench.broker import broker_config, chunks, enqueue_calls, in_flight
from sluice.bench.child import Parent
from sluice.bench.harness import say, until
from sluice.bench.processes import child_command
from sluice.pipeline.config.types import Config, UpConfig
from sluice.pipeline.queue import ArqWorker, Call, JobQueue
from sluice.pipeline.run.role import default_name, role_process
from sluice.pipeline.run.stack import Deaths
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys

_KILLS = 2
_MAX_JOBS = 64  # all of a round's jobs: one worker may hold every one of them
_LOOK_S, _DEADLINE_S = 0.01, 180.0
_BACKOFF = UpConfig(restart_backoff_s=0.1)


async def last(_ctx: Any, seconds: float) -> None:
    """Take that long."""
    await asyncio.sleep(seconds)


async def serve_mortal(_: Parent, url: str, run: str) -> None:
    """A worker that may be killed, until SIGTERM; its heartbeat says whose leases end with it, as any worker's does."""
    config = Config(run=run, broker=broker_config(url))
    async with role_process(config, "worker", default_name("worker")) as role:
        worker = ArqWorker(
            [last], client=role.client, keys=role.keys, config=config, name=role.name, stop=role.stop,
            max_jobs=_MAX_JOBS, handle_signals=False,
        )  # fmt: skip
        role.status.fact(owner=worker.leases.queue.owner)
        await role.status.beat()
        await worker.main()
        await worker.close()


async def deaths(
    client: Any, url: str, home: Path, by_workers: Sequence[int], jobs: int, job_s: float
) -> dict[str, Any]:
    """Seconds, by workers."""
    found: dict[str, dict[str, float]] = {}
    for workers in by_workers:
        quiet, killed = (
            _Round(client, Config(run=f"deaths-{workers}-{kills}", broker=broker_config(url)), home, workers)
            for kills in (0, _KILLS)
        )
        quiet_s, killed_s = await quiet.run(jobs, job_s, 0), await killed.run(jobs, job_s, _KILLS)
        start_s = max(quiet.start_s, killed.start_s)
        limit_s = 2 * quiet_s + start_s
        found[str(workers)] = {"quiet_s": quiet_s, "killed_s": killed_s, "start_s": start_s, "limit_s": limit_s}
        say(
            f"{jobs} jobs of {job_s:g} s, {workers} workers: {quiet_s:.2f} s; with {_KILLS} "
            f"kills {killed_s:.2f} s (aim {limit_s:.2f} s, a worker's start {start_s:.2f} s)"
        )
    return {"deaths": found, "deaths_jobs": jobs, "deaths_job_s": job_s, "deaths_kills": _KILLS}


class _Round:
    """Workers under their supervisor, on a run of their own."""

    def __init__(self, client: Any, config: Config, home: Path, workers: int) -> None:
        self._client, self._config, self._keys, self._workers = client, config, Keys(config.run), workers
        env = {**os.environ, "REDIS_URL": config.broker.url or ""}
        self._supervisor = Supervisor(_BACKOFF, home / config.run, env, Deaths(client, config).settle)
        self.start_s = 0.0

    async def run(self, jobs: int, job_s: float, kills: int) -> float:
        """Seconds from the first enqueue to the last job's end."""
        async with self._started():
            started, run = time.perf_counter(), self._config.run
            queue = JobQueue(self._client, self._keys)
            calls = [Call(job_id=f"{run}:{number}", function="last", args=(job_s,)) for number in range(jobs)]
            await in_flight(enqueue_calls(queue, chunk) for chunk in chunks(calls))
            for _ in range(kills):
                await self._kill_the_busiest(job_s / 2)

            async def over() -> bool:
                return int(await self._client.hget(self._keys.counts, "called") or 0) >= jobs

            await until(over, f"{jobs} jobs to end", _DEADLINE_S, every_s=_LOOK_S)
            return time.perf_counter() - started

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncGenerator[None]:
        for number in range(self._workers):
            command = child_command(serve_mortal, [self._config.broker.url, self._config.run])
            self._supervisor.add(f"worker-{number}", command)
        began = time.perf_counter()

        async def up() -> bool:
            return len((await snapshot(self._client, self._keys)).alive("worker")) == self._workers

        task = asyncio.create_task(self._supervisor.run())
        try:
            await until(up, f"{self._workers} workers to start", _DEADLINE_S, every_s=_LOOK_S)
            self.start_s = time.perf_counter() - began
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            await self._supervisor.stop()

    async def _holders(self) -> Counter[str]:
        """Jobs by the worker that holds them."""
        pipe = self._client.pipeline(transaction=False)
        for job_id in await self._client.zrange(self._keys.leases, 0, -1):
            pipe.hget(self._keys.job_state.encode() + job_id, "worker")
        return Counter(name.decode() for name in await pipe.execute() if name)

    async def _kill_the_busiest(self, after_s: float) -> None:
        """From outside: nobody announces it."""
        await until(self._holders, "a worker that holds jobs", _DEADLINE_S, every_s=_LOOK_S)
        await asyncio.sleep(after_s)
        [(name, _)] = (await self._holders()).most_common(1)
        if pid := self._supervisor.children[name].pid:
            os.kill(pid, signal.SIGKILL)

        async def gone() -> bool:
            return name not in await self._holders()

        await until(gone, f"the leases of {name} to end", _DEADLINE_S, every_s=_LOOK_S)
