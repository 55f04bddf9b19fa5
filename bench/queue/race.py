"""No-op jobs per second of each system, by number of worker processes.

- A round: the workers are paused, the queue is filled; the clock runs from their release to the last job's end.
- arq's best setting is looked for at each number of workers, by one short round each; the winner then races.

| system | worker processes                            | ended when                                        |
|--------|---------------------------------------------|---------------------------------------------------|
| ours   | ArqWorker                                   | the queue is empty, and as many calls are counted |
| arq    | arq's command, its serialiser, its defaults | the queue is empty (a job leaves it at its end)   |
| saq    | SAQ's command, its defaults                 | nothing is incomplete                             |
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sluice.bench.broker import broker_config, broker_s, chunks, enqueue_calls, in_flight
from sluice.bench.child import Parent
from sluice.bench.harness import play, say, until
from sluice.bench.processes import Fleet, child_command
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import Config
from sluice.pipeline.logs import configure
from sluice.pipeline.queue import ArqWorker, Call, Claimed, JobQueue, arq_pool
from sluice.pipeline.wire.keys import Keys

Settings = dict[str, float | int | bool]

ARQ_GRID: tuple[Settings, ...] = (
    {"max_jobs": 10, "poll_delay": 0.01},
    {"max_jobs": 50, "poll_delay": 0.01},
    {"max_jobs": 50, "poll_delay": 0.01, "queue_read_limit": 50},
    {"max_jobs": 50, "poll_delay": 0.001, "queue_read_limit": 50},
    {"max_jobs": 50, "poll_delay": 0.01, "queue_read_limit": 50, "log_results": False, "keep_result": 0},
    {"max_jobs": 200, "poll_delay": 0.01},
)
"""Of arq's worker; its defaults are max_jobs 10, poll_delay 0.5, queue_read_limit 5 × max_jobs and at least 100."""

MAX_JOBS = 100  # of our worker: as many as one claim brings
SAQ_MISSING = "SAQ is not installed, saq_jobs_s is null; to have it: pip install 'sluice[bench]'"
_START_S = 60.0
_DEADLINE_S = 120.0
_LOOK_S = 0.003
_WARM_SHARE = 4  # of a probe, to warm up for it
_OURS_WARM = 10  # times as many jobs as the others to warm up with
_ARQ_QUEUE = "arq:queue"
_PAGE = 2000
_ENQUEUES = 20  # of a foreign client, at a time


def saq_is_installed() -> bool:
    """Whether this Python has SAQ."""
    return find_spec("saq") is not None


class Totals(msgspec.Struct):
    """What one of our workers did: jobs that claims brought, claims that brought any, seconds that jobs waited."""

    claimed: int = 0
    claims: int = 0
    waits_s: list[float] = []


async def noop(_ctx: Any) -> None:
    """The job that races."""


async def mark(ctx: dict[Any, Any], sent_at: float) -> None:
    """Note how long ago it was sent (Unix seconds)."""
    ctx["totals"].waits_s.append(time.time() - sent_at)


async def serve_ours(parent: Parent, url: str, name: str, run: str) -> None:
    """One of our workers: it says `ready`, serves until SIGTERM, and tells its totals."""
    configure("bench")
    config, totals = Config(run=run, broker=broker_config(url)), Totals()

    async def ready(_ctx: Any) -> None:
        parent.tell("ready")

    def count(got: Claimed) -> None:
        totals.claimed += len(got.claims)
        totals.claims += bool(got.claims)

    client = connect(config.broker)
    worker = ArqWorker(
        [noop, mark], client=client, keys=Keys(run), config=config, name=name, max_jobs=MAX_JOBS, on_startup=ready,
        ctx={"totals": totals}, on_claim=count,
    )  # fmt: skip
    await worker.main()
    await worker.close()
    await client.aclose()
    parent.tell(totals)


class System:
    """One system on its broker: it fills its queue, and runs worker processes of its own kind."""

    leftovers: ClassVar[str]  # keys that ended jobs leave behind

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        self.url, self.settings = url, settings or {}
        self.client: Any = connect(broker_config(url))
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
            await fleet.start(self.command(worker), env, piped=True)
        await fleet.answers(_START_S)
        fleet.pause()

    async def fill(self, count: int) -> None:
        """Enqueue jobs; what ended ones left behind goes first."""
        cursor: int = 0
        while True:
            cursor, found = await self.client.scan(cursor, match=self.leftovers, count=_PAGE)
            if found:
                await self.client.unlink(*found)
            if not cursor:
                break
        await self.enqueue(count)
        self.filled += count


class Ours(System):
    """The leased queue, as a run of its own: nothing of another one is in its way."""

    leftovers = "arq:result:*"

    def __init__(self, url: str, run: str) -> None:
        super().__init__(url)
        self._keys = Keys(run)
        self.queue = JobQueue(self.client, self._keys)

    def command(self, worker: int) -> list[str]:
        return child_command(serve_ours, [self.url, f"worker-{worker}", self._keys.run])

    async def enqueue(self, count: int) -> None:
        calls = [Call(job_id=f"{self._keys.run}:{self.filled + i}", function="noop") for i in range(count)]
        await in_flight(enqueue_calls(self.queue, chunk) for chunk in chunks(calls))

    async def is_empty(self) -> bool:
        pipe: Any = self.client.pipeline(transaction=False)
        pipe.zcard(self._keys.jobs).hget(self._keys.counts, "called")
        left, called = await pipe.execute()
        return not left and int(called or 0) == self.filled

    async def totals(self, fleet: Fleet) -> list[Totals]:
        """End the workers; what each did."""
        await fleet.end()
        return await fleet.receive(Totals, _START_S)


class Arq(System):
    """Stock arq; with other settings than its defaults it does not log each job either."""

    leftovers = "arq:result:*"

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        super().__init__(url, settings)
        self._pool = arq_pool(self.client, _ARQ_QUEUE)
        self._pool.job_serializer = self._pool.job_deserializer = None  # its own

    def command(self, worker: int) -> list[str]:
        quiet = ["--custom-log-dict", "sluice.bench.queue.stock.quiet"] if self.settings else []
        return [sys.executable, "-m", "arq", "sluice.bench.queue.stock.arq_settings", *quiet]

    async def enqueue(self, count: int) -> None:
        await in_flight((self._pool.enqueue_job("noop") for _ in range(count)), _ENQUEUES)

    async def is_empty(self) -> bool:
        return not await self.client.zcard(_ARQ_QUEUE)


class Saq(System):
    """Stock SAQ."""

    leftovers = "saq:job:*"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._queue: Any = importlib.import_module("saq").Queue.from_url(url)

    def command(self, worker: int) -> list[str]:
        return [sys.executable, "-m", "saq", "sluice.bench.queue.stock.saq_settings"]

    async def enqueue(self, count: int) -> None:
        await in_flight((self._queue.enqueue("noop") for _ in range(count)), _ENQUEUES)

    async def close(self) -> None:
        await self._queue.disconnect()
        await super().close()

    async def is_empty(self) -> bool:
        return not await self._queue.count("incomplete")


@dataclass
class Outcome:
    """By system, then by number of workers."""

    rates: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    jobs: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    worker_us: dict[int, list[float]] = field(default_factory=dict)  # processor time a job: our workers'
    broker_us: dict[int, list[float]] = field(default_factory=dict)  # and our broker's
    claims_per_job: dict[int, float] = field(default_factory=dict)
    claim_calls_per_job: dict[int, float] = field(default_factory=dict)
    grid: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    best: dict[int, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class Lap:
    """Jobs per second, and microseconds of processor time a job."""

    rate: float
    worker_us: float
    broker_us: float


@dataclass
class Entrant:
    """A system with its workers, paused."""

    name: str
    system: System
    fleet: Fleet
    jobs: int = 0

    async def run(self, jobs: int) -> Lap:
        """Fill, release, wait for the end."""
        client = self.system.client
        await self.system.fill(jobs)
        workers_s, used_s, started = self.fleet.cpu_s(), await broker_s(client), time.perf_counter()
        self.fleet.resume()
        try:
            what = f"the jobs of {self.name} to end"
            await until(self.system.is_empty, what, _DEADLINE_S, every_s=_LOOK_S, check=self.fleet.check)
            seconds = time.perf_counter() - started
        finally:
            self.fleet.pause()
        workers_s, used_s = self.fleet.cpu_s() - workers_s, await broker_s(client) - used_s
        return Lap(jobs / seconds, 1e6 * workers_s / jobs, 1e6 * used_s / jobs)


class Race:
    """All rounds; `durable` and `plain` are the brokers' URLs, others than us get as many jobs as end in `seconds`."""

    def __init__(
        self, durable: str, plain: str, home: Path, *, jobs: int, rounds: int, seconds: float, probe_jobs: int,
        grid: Sequence[Settings],
    ) -> None:  # fmt: skip
        self._durable, self._plain, self._home = durable, plain, home
        self._jobs, self._rounds, self._seconds, self._probe, self._grid = jobs, rounds, seconds, probe_jobs, grid
        self._fleets = 0
        self.outcome = Outcome()

    async def run(self, workers: int) -> None:
        """Of so many workers."""
        async with contextlib.AsyncExitStack() as scope:
            ours, *others = await self._line_up(workers, scope)
            entrants = {each.name: each for each in (ours, *others)}

            async def one(name: str, _: int) -> Lap:
                return await entrants[name].run(entrants[name].jobs)

            def ended(number: int, laps: Any) -> None:
                rates = ", ".join(f"{name} {laps[name].rate:.0f}" for name in entrants)
                say(f"{workers} workers, round {number + 1}/{self._rounds}: {rates} jobs/s")

            laps = await play(self._rounds, list(entrants), one, ended)
            for name, entrant in entrants.items():
                self.outcome.rates[name][workers] = [each[name].rate for each in laps]
                self.outcome.jobs[name][workers] = entrant.jobs
            self.outcome.worker_us[workers] = [each["ours"].worker_us for each in laps]
            self.outcome.broker_us[workers] = [each["ours"].broker_us for each in laps]
            assert isinstance(ours.system, Ours)
            totals, jobs = await ours.system.totals(ours.fleet), ours.system.filled
            self.outcome.claims_per_job[workers] = sum(each.claimed for each in totals) / jobs
            self.outcome.claim_calls_per_job[workers] = sum(each.claims for each in totals) / jobs

    async def _line_up(self, workers: int, scope: contextlib.AsyncExitStack) -> list[Entrant]:
        """Ours first; all warm, and each with as many jobs as it ends in the time of a round."""
        ours = await self._enter("ours", Ours(self._durable, f"race-{workers}"), workers, scope)
        await ours.run(self._probe * _OURS_WARM)
        ours.jobs = self._jobs
        others = [await self._enter("arq", Arq(self._plain), workers, scope)]
        if saq_is_installed():
            others.append(await self._enter("saq", Saq(self._plain), workers, scope))
        for entrant in others:
            entrant.jobs = self._jobs_at((await entrant.run(self._probe)).rate)
        return [ours, await self._best_arq(workers, scope), *others]

    async def _best_arq(self, workers: int, scope: contextlib.AsyncExitStack) -> Entrant:
        best, fastest, best_scope = None, 0.0, contextlib.AsyncExitStack()
        scope.push_async_callback(lambda: best_scope.aclose())
        rows = self.outcome.grid[workers] = []
        for settings in self._grid:
            async with contextlib.AsyncExitStack() as attempt:
                entrant = await self._enter("arq_best", Arq(self._plain, settings), workers, attempt)
                await entrant.run(self._probe // _WARM_SHARE)
                rate = (await entrant.run(self._probe)).rate
                rows.append({**settings, "jobs_s": rate})
                if rate > fastest:
                    await best_scope.aclose()
                    best, fastest, best_scope = entrant, rate, attempt.pop_all()
                    self.outcome.best[workers] = settings
        assert best is not None
        best.jobs = self._jobs_at(fastest)
        return best

    async def _enter(self, name: str, system: System, workers: int, scope: contextlib.AsyncExitStack) -> Entrant:
        scope.push_async_callback(system.close)
        self._fleets += 1
        fleet = await scope.enter_async_context(Fleet(f"{name}-{self._fleets}", self._home))
        await system.start(workers, fleet)
        return Entrant(name, system, fleet)

    def _jobs_at(self, rate: float) -> int:
        return max(self._probe, round(rate * self._seconds))
