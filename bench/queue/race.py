"""No-op jobs per second of each system, by number of worker processes.

- A round: the workers are paused, the queue is filled; the clock runs from their release to the last job's end.
- For each number of workers, one short round per setting finds arq's best; the winner then races.

| system | worker processes                            | ended when                                        |
|--------|---------------------------------------------|---------------------------------------------------|
| ours   | ArqWorker                                   | the queue is empty, and as many calls are counted |
| arq    | arq's worker, its serialiser, its defaults  | the queue is empty (a job leaves it at its end)   |
| saq    | SAQ's worker, its defaults; it is installed | nothing is incomplete                             |
|        | for benchmarks only (the extra `bench`)     |                                                   |
"""

from __future__ import annotations

import contextlib
import importlib
import logging.config
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import arq
import msgspec
from arq.logs import default_log_config

from sluice.bench.broker import broker_config, broker_s, chunks, enqueue_calls, in_flight
from sluice.bench.child import Parent
from sluice.bench.harness import at_least_one, play, say, until
from sluice.bench.processes import Fleet
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import Config
from sluice.pipeline.logs import configure
from sluice.pipeline.queue import ArqWorker, Call, Claimed, JobQueue, arq_pool, arq_redis_settings
from sluice.pipeline.run.role import default_name
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

MAX_JOBS = 100  # of our worker: as many as one claim returns
SAQ_MISSING = "SAQ is not installed, saq_jobs_s is null; to include it: pip install 'sluice[bench]'"
_START_S = 60.0
_DEADLINE_S = 120.0
_LOOK_S = 0.003
_WARM_SHARE = 4  # of a probe, as its warm-up
_OURS_WARM = 10  # times as many jobs as the others to warm up with
_ARQ_QUEUE = "arq:queue"
_PAGE = 2000
_ENQUEUES = 20  # of a foreign client, at the same time


def saq_is_installed() -> bool:
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


async def serve_ours(parent: Parent, url: str, run: str) -> None:
    """One of our workers: it says `ready`, serves until SIGTERM, and reports its totals."""
    configure("bench")
    config, totals = Config(run=run, broker=broker_config(url)), Totals()

    async def ready(_ctx: Any) -> None:
        parent.tell("ready")

    def count(got: Claimed) -> None:
        totals.claimed += len(got.claims)
        totals.claims += bool(got.claims)

    client = connect(config.broker)
    worker = ArqWorker(
        [noop, mark], client=client, keys=Keys(run), config=config, name=default_name("worker"), max_jobs=MAX_JOBS,
        on_startup=ready, ctx={"totals": totals}, on_claim=count,
    )  # fmt: skip
    await worker.main()
    await worker.close()
    await client.aclose()
    parent.tell(totals)


async def serve_arq(parent: Parent, url: str, settings: Settings) -> None:
    """A worker of stock arq, logging as its command does: two lines a job, unless it has settings of ours."""
    logging.config.dictConfig({"version": 1} if settings else default_log_config(verbose=False))

    async def ready(_ctx: Any) -> None:
        parent.tell("ready")

    options: Any = {"functions": [noop], "on_startup": ready, **settings}
    await arq.Worker(redis_settings=arq_redis_settings(url), **options).async_run()


async def serve_saq(parent: Parent, url: str) -> None:
    saq: Any = importlib.import_module("saq")

    async def ready(_ctx: Any) -> None:
        parent.tell("ready")

    queue = saq.Queue.from_url(url)
    await queue.connect()
    await saq.Worker(queue, [noop], startup=ready).start()


@dataclass(frozen=True)
class Lap:
    """Jobs per second, and microseconds of CPU time per job."""

    rate: float
    worker_us: float
    broker_us: float


class System(ABC):
    """One system on its broker, with its own kind of worker processes, which are stopped outside rounds."""

    leftovers: ClassVar[str]  # keys that ended jobs leave behind

    def __init__(self, name: str, url: str, home: Path, serve: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.client: Any = connect(broker_config(url))
        self.fleet = Fleet(name, home)
        self.filled, self.jobs = 0, 0  # so far, and in each round
        self._serve, self._arguments = serve, arguments

    @abstractmethod
    async def enqueue(self, count: int) -> None: ...

    @abstractmethod
    async def is_empty(self) -> bool:
        """Whether every job has ended."""

    async def close(self) -> None:
        await self.client.aclose()

    @contextlib.asynccontextmanager
    async def started(self, workers: int) -> AsyncGenerator[Self]:
        async with contextlib.AsyncExitStack() as scope:
            scope.push_async_callback(self.close)
            await scope.enter_async_context(self.fleet)
            for _ in range(workers):
                await self.fleet.start_child(self._serve, self._arguments)
            await self.fleet.receive(str, _START_S)
            self.fleet.pause()
            yield self

    async def run(self, jobs: int) -> Lap:
        """Fill, release, wait for the end; first delete what ended jobs left behind."""
        cursor: int = 0
        while True:
            cursor, found = await self.client.scan(cursor, match=self.leftovers, count=_PAGE)
            if found:
                await self.client.unlink(*found)
            if not cursor:
                break
        await self.enqueue(jobs)
        self.filled += jobs
        workers_s, used_s, started = self.fleet.cpu_s(), await broker_s(self.client), time.perf_counter()
        with self.fleet.running():
            await until(self.is_empty, "all jobs to end", _DEADLINE_S, every_s=_LOOK_S, check=self.fleet.check)
            seconds = time.perf_counter() - started
        workers_s, used_s = self.fleet.cpu_s() - workers_s, await broker_s(self.client) - used_s
        return Lap(jobs / seconds, 1e6 * workers_s / jobs, 1e6 * used_s / jobs)


class Ours(System):
    """The leased queue, as a separate run, so others don't interfere."""

    leftovers = "arq:result:*"

    def __init__(self, name: str, url: str, home: Path, run: str) -> None:
        super().__init__(name, url, home, serve_ours, [url, run])
        self._keys = Keys(run)
        self.queue = JobQueue(self.client, self._keys)

    async def enqueue(self, count: int) -> None:
        calls = [Call(job_id=f"{self._keys.run}:{self.filled + i}", function="noop") for i in range(count)]
        await in_flight(enqueue_calls(self.queue, chunk) for chunk in chunks(calls))

    async def is_empty(self) -> bool:
        pipe: Any = self.client.pipeline(transaction=False)
        pipe.zcard(self._keys.jobs).hget(self._keys.counts, "called")
        left, called = await pipe.execute()
        return not left and int(called or 0) == self.filled

    async def totals(self) -> list[Totals]:
        """End the workers; returns what each did."""
        await self.fleet.end()
        return await self.fleet.receive(Totals, _START_S)


class Arq(System):
    leftovers = "arq:result:*"

    def __init__(self, name: str, url: str, home: Path, settings: Settings | None = None) -> None:
        super().__init__(name, url, home, serve_arq, [url, settings or {}])
        self._pool = arq_pool(self.client, _ARQ_QUEUE)
        self._pool.job_serializer = self._pool.job_deserializer = None  # its own

    async def enqueue(self, count: int) -> None:
        await in_flight((self._pool.enqueue_job("noop") for _ in range(count)), _ENQUEUES)

    async def is_empty(self) -> bool:
        return not await self.client.zcard(_ARQ_QUEUE)


class Saq(System):
    leftovers = "saq:job:*"

    def __init__(self, name: str, url: str, home: Path) -> None:
        super().__init__(name, url, home, serve_saq, [url])
        self._queue: Any = importlib.import_module("saq").Queue.from_url(url)

    async def enqueue(self, count: int) -> None:
        await in_flight((self._queue.enqueue("noop") for _ in range(count)), _ENQUEUES)

    async def close(self) -> None:
        await self._queue.disconnect()
        await super().close()

    async def is_empty(self) -> bool:
        return not await self._queue.count("incomplete")


@dataclass(frozen=True)
class Plan:
    """Seconds and counts are per round; `jobs` are ours, the others get as many as they end in `seconds`."""

    workers: tuple[int, ...] = (1, 2, 4, 8)
    jobs: int = 30_000
    rounds: int = 3
    seconds: float = 2.0
    grid: tuple[Settings, ...] = ARQ_GRID
    probe_jobs: int = 400
    idle_jobs: int = 400
    bulk_jobs: int = 40_000
    commit_kb: tuple[int, ...] = (1, 16, 256)
    commit_s: float = 1.5
    depths: tuple[int, ...] = (1_000, 1_000_000)
    claims: int = 2_000
    death_workers: tuple[int, ...] = (2, 4)
    death_jobs: int = 64
    death_job_s: float = 1.0

    @classmethod
    def of(cls, *, workers: tuple[int, ...], jobs: int | None, quick: bool) -> Plan:
        at_least_one(workers=workers, jobs=jobs)
        counts = tuple(sorted(set(workers)))
        if not quick:
            return cls(workers=counts, jobs=jobs or cls.jobs)
        return cls(
            workers=counts, jobs=jobs or 500, rounds=1, seconds=0.2, grid=ARQ_GRID[:1], probe_jobs=60, idle_jobs=20,
            bulk_jobs=1_000, commit_s=0.05, depths=(100, 2_000), claims=50,
            death_workers=(2,), death_jobs=16, death_job_s=0.3,
        )  # fmt: skip


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


class Race:
    """All rounds; `durable` and `plain` are the brokers' URLs."""

    def __init__(self, plan: Plan, durable: str, plain: str, home: Path) -> None:
        self._plan, self._durable, self._plain, self._home = plan, durable, plain, home
        self.outcome = Outcome()

    async def run(self, workers: int) -> None:
        async with contextlib.AsyncExitStack() as scope:
            systems = await self._line_up(workers, scope)

            async def one(name: str, _: int) -> Lap:
                return await systems[name].run(systems[name].jobs)

            def ended(number: int, laps: Any) -> None:
                rates = ", ".join(f"{name} {laps[name].rate:.0f}" for name in systems)
                say(f"{workers} workers, round {number + 1}/{self._plan.rounds}: {rates} jobs/s")

            laps = await play(self._plan.rounds, list(systems), one, ended)
            for name, system in systems.items():
                self.outcome.rates[name][workers] = [each[name].rate for each in laps]
                self.outcome.jobs[name][workers] = system.jobs
            self.outcome.worker_us[workers] = [each["ours"].worker_us for each in laps]
            self.outcome.broker_us[workers] = [each["ours"].broker_us for each in laps]
            ours = systems["ours"]
            assert isinstance(ours, Ours)
            totals = await ours.totals()
            self.outcome.claims_per_job[workers] = sum(each.claimed for each in totals) / ours.filled
            self.outcome.claim_calls_per_job[workers] = sum(each.claims for each in totals) / ours.filled

    async def _line_up(self, workers: int, scope: contextlib.AsyncExitStack) -> dict[str, System]:
        """All systems, warm; the others get as many jobs as they finish in the time of a round."""
        ours = Ours(f"ours-{workers}", self._durable, self._home, f"race-{workers}")
        await scope.enter_async_context(ours.started(workers))
        await ours.run(self._plan.probe_jobs * _OURS_WARM)
        ours.jobs = self._plan.jobs
        others: dict[str, System] = {"arq": Arq(f"arq-{workers}", self._plain, self._home)}
        if saq_is_installed():
            others["saq"] = Saq(f"saq-{workers}", self._plain, self._home)
        for system in others.values():
            await scope.enter_async_context(system.started(workers))
        for system in others.values():
            system.jobs = self._jobs_at((await system.run(self._plan.probe_jobs)).rate)
        return {"ours": ours, "arq_best": await self._best_arq(workers, scope), **others}

    async def _best_arq(self, workers: int, scope: contextlib.AsyncExitStack) -> System:
        best, fastest, best_scope = None, 0.0, contextlib.AsyncExitStack()
        scope.push_async_callback(lambda: best_scope.aclose())
        rows = self.outcome.grid[workers] = []
        for number, settings in enumerate(self._plan.grid):
            async with contextlib.AsyncExitStack() as attempt:
                system = Arq(f"arq_best-{workers}-{number}", self._plain, self._home, settings)
                await attempt.enter_async_context(system.started(workers))
                await system.run(self._plan.probe_jobs // _WARM_SHARE)
                rate = (await system.run(self._plan.probe_jobs)).rate
                rows.append({**settings, "jobs_s": rate})
                if rate > fastest:
                    await best_scope.aclose()
                    best, fastest, best_scope = system, rate, attempt.pop_all()
                    self.outcome.best[workers] = settings
        assert best is not None
        best.jobs = self._jobs_at(fastest)
        return best

    def _jobs_at(self, rate: float) -> int:
        return max(self._plan.probe_jobs, round(rate * self._plan.seconds))
