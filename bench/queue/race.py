"""No-op jobs per second of each system, by number of worker processes.

- A round: the workers are paused, the queue is filled; the clock runs from their release to the last job's end.
- For each number of workers, one short round per setting finds arq's best; the winner then races.
- arq runs with its own serialiser. A job of arq leaves the queue when it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging.config
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

import arq
import msgspec
from arq.logs import default_log_config

from sluice.bench.broker import Broker, enqueue_calls, in_flight, run_config
from sluice.bench.harness import BenchPlan, by_count, median_of, play, ratios, spread, until
from sluice.bench.processes import START_S, Fleet, Parent
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.errors import how_to_install
from sluice.pipeline.logs import configure
from sluice.pipeline.queue import ArqWorker, Claimed, arq_pool, arq_redis_settings
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
SAQ_MISSING = f"SAQ is not installed, saq_jobs_s is null; to include it: {how_to_install('bench')}"
SYSTEMS = ("ours", "arq", "arq_best", "saq")
_AIM_AT = 2  # workers at which the systems are compared
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
    config, totals = run_config(run, url), Totals()

    def count(got: Claimed) -> None:
        totals.claimed += len(got.claims)
        totals.claims += bool(got.claims)

    client, name = connect(config.broker), default_name("worker")
    worker = ArqWorker(
        [noop, mark], client=client, keys=Keys(run), config=config, name=name, max_jobs=MAX_JOBS,
        on_startup=_ready(parent), ctx={"totals": totals}, on_claim=count,
    )  # fmt: skip
    await worker.main()
    await worker.close()
    await client.aclose()
    parent.tell(totals)


async def serve_arq(parent: Parent, url: str, settings: Settings) -> None:
    """A worker of stock arq, logging as its command does: two lines a job, unless it has settings of ours."""
    logging.config.dictConfig({"version": 1} if settings else default_log_config(verbose=False))

    options: Any = {"functions": [noop], "on_startup": _ready(parent), **settings}
    await arq.Worker(redis_settings=arq_redis_settings(url), **options).async_run()


async def serve_saq(parent: Parent, url: str) -> None:
    saq: Any = importlib.import_module("saq")
    queue = saq.Queue.from_url(url)
    await queue.connect()
    await saq.Worker(queue, [noop], startup=_ready(parent)).start()


def _ready(parent: Parent) -> Callable[[Any], Awaitable[None]]:
    """Says `ready` when the worker has started."""

    async def ready(_ctx: Any) -> None:
        parent.tell("ready")

    return ready


@dataclass(frozen=True)
class Lap:
    """Jobs per second, and microseconds of CPU time per job."""

    rate: float
    worker_us: float
    broker_us: float


class System(ABC):
    """One system on its broker, with its own kind of worker processes, which are stopped outside rounds."""

    leftovers: ClassVar[str] = "arq:result:*"  # keys that ended jobs leave behind

    def __init__(self, broker: Broker, serve: Callable[..., Any], *arguments: Any) -> None:
        self.client, self._broker = broker.client, broker
        self.filled, self.jobs = 0, 0  # so far, and in each round
        self.scope = contextlib.AsyncExitStack()  # of its own connections
        self._serve, self._arguments = serve, arguments

    @abstractmethod
    async def enqueue(self, count: int) -> None: ...

    @abstractmethod
    async def is_empty(self) -> bool:
        """Whether every job has ended."""

    @contextlib.asynccontextmanager
    async def started(self, name: str, workers: int, home: Path) -> AsyncGenerator[Self]:
        arguments = [[self._broker.url, *self._arguments]] * workers
        async with self.scope, Fleet.of_children(name, home, self._serve, *arguments) as self.fleet:
            self.fleet.pause()
            yield self

    async def run(self, jobs: int) -> Lap:
        """Fill, release, wait for the end; first delete what ended jobs left behind."""
        async for key in self.client.scan_iter(match=self.leftovers, count=_PAGE):
            await self.client.unlink(key)
        await self.enqueue(jobs)
        self.filled += jobs
        workers_s, used_s, started = self.fleet.cpu_s(), await self._broker.cpu_s(), time.perf_counter()
        with self.fleet.running():
            await until(self.is_empty, "all jobs to end", _DEADLINE_S, every_s=_LOOK_S, check=self.fleet.check)
            seconds = time.perf_counter() - started
        workers_s, used_s = self.fleet.cpu_s() - workers_s, await self._broker.cpu_s() - used_s
        return Lap(jobs / seconds, 1e6 * workers_s / jobs, 1e6 * used_s / jobs)


class Ours(System):
    """The leased queue, as a separate run, so others don't interfere."""

    def __init__(self, broker: Broker, run: str) -> None:
        super().__init__(broker, serve_ours, run)
        self.queue = broker.queue(run)

    async def enqueue(self, count: int) -> None:
        await enqueue_calls(self.queue, "noop", range(self.filled, self.filled + count))

    async def is_empty(self) -> bool:
        pipe: Any = self.client.pipeline(transaction=False)
        pipe.zcard(self.queue.keys.jobs).hget(self.queue.keys.counts, "called")
        left, called = await pipe.execute()
        return not left and int(called or 0) == self.filled

    async def totals(self) -> list[Totals]:
        """End the workers, which say it as they end; returns what each did."""
        await self.fleet.end(START_S)
        return await self.fleet.receive(Totals, START_S)


class Arq(System):
    def __init__(self, broker: Broker, settings: Settings | None = None) -> None:
        super().__init__(broker, serve_arq, settings or {})
        self._pool = arq_pool(self.client, _ARQ_QUEUE)
        self._pool.job_serializer = self._pool.job_deserializer = None  # its own

    async def enqueue(self, count: int) -> None:
        await in_flight((self._pool.enqueue_job("noop") for _ in range(count)), _ENQUEUES)

    async def is_empty(self) -> bool:
        return not await self.client.zcard(_ARQ_QUEUE)


class Saq(System):
    leftovers = "saq:job:*"

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, serve_saq)
        self._queue: Any = importlib.import_module("saq").Queue.from_url(broker.url)
        self.scope.push_async_callback(self._queue.disconnect)

    async def enqueue(self, count: int) -> None:
        await in_flight((self._queue.enqueue("noop") for _ in range(count)), _ENQUEUES)

    async def is_empty(self) -> bool:
        return not await self._queue.count("incomplete")


class Plan(BenchPlan, frozen=True, kw_only=True):
    """Seconds and counts are per round; `jobs` are ours, the others get as many as they end in `seconds`."""

    workers: tuple[int, ...] = (1, 2, 4, 8)
    jobs: int = 30_000
    rounds: int = 3
    seconds: float = 2.0
    settings: int = len(ARQ_GRID)  # of arq's worker, from which the best is taken
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

    QUICK = {
        "jobs": 500, "rounds": 1, "seconds": 0.2, "settings": 1, "probe_jobs": 60, "idle_jobs": 20, "bulk_jobs": 1_000,
        "commit_s": 0.05, "depths": (100, 2_000), "claims": 50, "death_workers": (2,), "death_jobs": 16,
        "death_job_s": 0.3,
    }  # fmt: skip


@dataclass
class Outcome:
    """By number of workers."""

    rounds: dict[int, list[dict[str, Lap]]] = field(default_factory=dict)
    jobs: dict[int, dict[str, int]] = field(default_factory=dict)  # of a round, by system
    claimed: dict[int, float] = field(default_factory=dict)  # by our workers, per job
    claims: dict[int, float] = field(default_factory=dict)  # calls that brought jobs, per job
    grid: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    best: dict[int, Settings] = field(default_factory=dict)

    def of(self, name: str) -> dict[int, list[dict[str, Lap]]]:
        """The rounds in which this system ran."""
        return {count: rounds for count, rounds in self.rounds.items() if name in rounds[0]}

    def ratio(self, other: str) -> float | None:
        """Median of ours over the other's, round by round, at 2 workers; None without such rounds."""
        rounds = self.of(other).get(_AIM_AT)
        return median(ratios(rounds, "ours", other, _rate)) if rounds else None

    def fields(self) -> dict[str, Any]:
        """The results; null for a system that didn't run."""

        def medians(name: str, of: Callable[[Lap], float] = _rate) -> dict[str, float] | None:
            return by_count(self.of(name), lambda rounds: median_of(rounds, name, of)) or None

        def spreads(name: str) -> dict[str, list[float]]:
            return by_count(self.of(name), lambda rounds: spread(each[name].rate for each in rounds))

        ran = [name for name in SYSTEMS if self.of(name)]
        return {
            **{f"{name}_jobs_s": medians(name) for name in SYSTEMS},
            "ours_vs_arq_best": self.ratio("arq_best"),
            "ours_vs_arq": self.ratio("arq"),
            "claims_per_job": by_count(self.claimed),
            "claim_calls_per_job": by_count(self.claims),
            "ours_worker_us": medians("ours", lambda lap: lap.worker_us),
            "ours_broker_us": medians("ours", lambda lap: lap.broker_us),
            "spread": {name: spreads(name) for name in ran},
            "jobs": {name: {str(count): by[name] for count, by in self.jobs.items() if name in by} for name in ran},
            "arq_best": by_count(self.best),
            "arq_grid": by_count(self.grid),
        }


def _rate(lap: Lap) -> float:
    return lap.rate


@dataclass
class Race:
    """All rounds, on two brokers."""

    plan: Plan
    durable: Broker
    plain: Broker
    home: Path
    outcome: Outcome = field(default_factory=Outcome)

    async def run(self, workers: int) -> None:
        found = self.outcome
        async with contextlib.AsyncExitStack() as scope:

            async def started(name: str, system: System) -> System:
                return await scope.enter_async_context(system.started(f"{name}-{workers}", workers, self.home))

            ours = Ours(self.durable, f"race-{workers}")
            systems: dict[str, System] = {"ours": await started("ours", ours)}
            await ours.run(self.plan.probe_jobs * _OURS_WARM)
            others = {"arq": Arq(self.plain), **({"saq": Saq(self.plain)} if saq_is_installed() else {})}
            others = {name: await started(name, system) for name, system in others.items()}
            probed = {name: (await system.run(self.plan.probe_jobs)).rate for name, system in others.items()}
            best = await started("arq_best", Arq(self.plain, await self._best_of_arq(workers)))
            systems |= {"arq_best": best, **others}
            probed["arq_best"] = await self._probe(best)
            ours.jobs = self.plan.jobs
            for name, rate in probed.items():  # as many as it ends in the time of a round
                systems[name].jobs = max(self.plan.probe_jobs, round(rate * self.plan.seconds))

            async def one(name: str, _: int) -> Lap:
                return await systems[name].run(systems[name].jobs)

            show, what = (lambda lap: f"{lap.rate:.0f} jobs/s"), f"{workers} workers, round"
            found.rounds[workers] = await play(self.plan.rounds, list(systems), one, show=show, what=what)
            found.jobs[workers] = {name: system.jobs for name, system in systems.items()}
            totals = await ours.totals()
            found.claimed[workers] = sum(each.claimed for each in totals) / ours.filled
            found.claims[workers] = sum(each.claims for each in totals) / ours.filled

    async def _best_of_arq(self, workers: int) -> Settings:
        """By a probe of every setting."""
        rows = self.outcome.grid[workers] = []
        for number, settings in enumerate(ARQ_GRID[: self.plan.settings]):
            async with Arq(self.plain, settings).started(f"arq-{workers}-{number}", workers, self.home) as system:
                rows.append({**settings, "jobs_s": await self._probe(system)})
        rates = [row["jobs_s"] for row in rows]
        chosen = self.outcome.best[workers] = ARQ_GRID[rates.index(max(rates))]
        return chosen

    async def _probe(self, system: System) -> float:
        await system.run(self.plan.probe_jobs // _WARM_SHARE)
        return (await system.run(self.plan.probe_jobs)).rate
