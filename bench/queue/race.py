"""No-op jobs per second of each system, by number of worker processes.

- A round: the workers are paused, the queue is filled; the clock runs from their release to the last job's end.
- The systems take turns, and each round begins with another one, so a drift of the machine hits all alike.
- arq's best setting is looked for at each number of workers, by one short round each; the winner then races.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.bench.processes import Fleet
from sluice.bench.queue.plan import Plan, Settings
from sluice.bench.queue.stock_saq import is_installed
from sluice.bench.queue.systems import Arq, Ours, Saq, System
from sluice.bench.report import say
from sluice.pipeline.errors import DeadlineExceeded

_DEADLINE_S = 120.0
_LOOK_S = 0.003
_WARM_SHARE = 4  # of a probe, to warm up for it
_OURS_WARM = 10  # times as many jobs as the others to warm up with

ByCount = dict[str, Any]


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
        await self.system.fill(jobs)
        workers_s, broker_s, started = self.fleet.cpu_s(), await self.system.broker_s(), time.perf_counter()
        self.fleet.resume()
        try:
            await self._end(started + _DEADLINE_S)
            seconds = time.perf_counter() - started
        finally:
            self.fleet.pause()
        workers_s, broker_s = self.fleet.cpu_s() - workers_s, await self.system.broker_s() - broker_s
        return Lap(jobs / seconds, 1e6 * workers_s / jobs, 1e6 * broker_s / jobs)

    async def _end(self, until: float) -> None:
        while not await self.system.is_empty():
            self.fleet.check()
            if time.perf_counter() > until:
                raise DeadlineExceeded(f"{self.name}: its jobs had not ended after {_DEADLINE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)


class Race:
    """All rounds; `durable` and `plain` are the brokers' URLs."""

    def __init__(self, plan: Plan, durable: str, plain: str, home: Path) -> None:
        self._plan, self._durable, self._plain, self._home = plan, durable, plain, home
        self._fleets = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Every number of workers, one after the other."""
        for workers in self._plan.workers:
            async with contextlib.AsyncExitStack() as scope:
                entrants = await self._line_up(workers, scope)
                for number in range(self._plan.rounds):
                    await self._round(number, workers, entrants)
                await self._count_claims(workers, entrants[0])
        return self.outcome

    async def _line_up(self, workers: int, scope: contextlib.AsyncExitStack) -> list[Entrant]:
        """Ours first; all warm, and each with as many jobs as it ends in the time of a round."""
        plan = self._plan
        ours = await self._enter("ours", Ours(self._durable, f"race-{workers}"), workers, scope)
        await ours.run(plan.probe_jobs * _OURS_WARM)
        ours.jobs = plan.jobs
        others = [await self._enter("arq", Arq(self._plain), workers, scope)]
        if is_installed():
            others.append(await self._enter("saq", Saq(self._plain), workers, scope))
        for entrant in others:
            lap = await entrant.run(plan.probe_jobs)
            entrant.jobs = self._jobs_at(lap.rate)
        return [ours, await self._best_arq(workers, scope), *others]

    async def _best_arq(self, workers: int, scope: contextlib.AsyncExitStack) -> Entrant:
        best, fastest, best_scope = None, 0.0, contextlib.AsyncExitStack()
        scope.push_async_callback(lambda: best_scope.aclose())
        rows = self.outcome.grid[workers] = []
        for settings in self._plan.grid:
            async with contextlib.AsyncExitStack() as attempt:
                entrant = await self._enter("arq_best", Arq(self._plain, settings), workers, attempt)
                await entrant.run(self._plan.probe_jobs // _WARM_SHARE)
                rate = (await entrant.run(self._plan.probe_jobs)).rate
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

    async def _round(self, number: int, workers: int, entrants: Sequence[Entrant]) -> None:
        first = number % len(entrants)
        for entrant in [*entrants[first:], *entrants[:first]]:
            lap = await entrant.run(entrant.jobs)
            self.outcome.rates[entrant.name].setdefault(workers, []).append(lap.rate)
            self.outcome.jobs[entrant.name][workers] = entrant.jobs
            if entrant is entrants[0]:
                self.outcome.worker_us.setdefault(workers, []).append(lap.worker_us)
                self.outcome.broker_us.setdefault(workers, []).append(lap.broker_us)
        rates = ", ".join(f"{each.name} {self.outcome.rates[each.name][workers][-1]:.0f}" for each in entrants)
        say(f"{workers} workers, round {number + 1}/{self._plan.rounds}: {rates} jobs/s")

    async def _count_claims(self, workers: int, ours: Entrant) -> None:
        assert isinstance(ours.system, Ours)
        totals = await ours.system.totals(ours.fleet)
        jobs = ours.system.filled
        self.outcome.claims_per_job[workers] = sum(each.claimed for each in totals) / jobs
        self.outcome.claim_calls_per_job[workers] = sum(each.claims for each in totals) / jobs

    def _jobs_at(self, rate: float) -> int:
        return max(self._plan.probe_jobs, round(rate * self._plan.seconds))
