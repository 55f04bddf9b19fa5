"""Everything in one run, on three brokers of one program, and the fields of the JSON object.

From enqueue to start on an idle queue: one worker process that sleeps, one job at a time, at random moments; both ends
read the same clock of the same host, before the enqueue call and first thing in the job.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sluice.bench.broker import broker_config, own_broker
from sluice.bench.harness import at_least_one, own_directory, percentile, run_interruptible, say, spread
from sluice.bench.processes import Fleet
from sluice.bench.queue.calls import bulk_enqueue, claims, commits
from sluice.bench.queue.deaths import deaths
from sluice.bench.queue.race import ARQ_GRID, MAX_JOBS, SAQ_MISSING, Ours, Outcome, Race, Settings, saq_is_installed
from sluice.pipeline.broker.connection import ping
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue import Call

SYSTEMS = ("ours", "arq", "arq_best", "saq")
_AIM_AT = 2  # workers at which the systems are compared
_IDLE_GAP_S, _IDLE_WARM, _IDLE_SETTLE_S = (0.005, 0.045), 5, 0.3


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
        """Checked. Raises ConfigError."""
        at_least_one(workers=workers, jobs=jobs)
        counts = tuple(sorted(set(workers)))
        if not quick:
            return cls(workers=counts, jobs=jobs or cls.jobs)
        return cls(
            workers=counts, jobs=jobs or 500, rounds=1, seconds=0.2, grid=ARQ_GRID[:1], probe_jobs=60, idle_jobs=20,
            bulk_jobs=1_000, commit_s=0.05, depths=(100, 2_000), claims=50,
            death_workers=(2,), death_jobs=16, death_job_s=0.3,
        )  # fmt: skip


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `*_jobs_s`: median of the rounds, by worker processes. `claims_per_job`: jobs that claims brought, over jobs: a
    job that two workers took counts twice; `claim_calls_per_job`: claims that brought any. `ours_vs_*`: median of the
    rounds' ratios at 2 workers. `ours_worker_us`, `ours_broker_us`: processor time a job. `spread`: slowest and
    fastest round. `aof`: what each system's broker wrote to disk. `deaths`: by workers, the time of
    `deaths_jobs` jobs of `deaths_job_s` seconds, without kills (`quiet_s`) and with `deaths_kills` (`killed_s`).
    """
    with own_directory() as home:
        return run_interruptible(_run(plan, home))


async def _run(plan: Plan, home: Path) -> dict[str, Any]:
    if not saq_is_installed():
        say(SAQ_MISSING)
    async with (
        own_broker(home / "durable") as (_, durable),
        own_broker(home / "plain", durable=False) as (_, plain),
        own_broker(home / "calls") as (client, url),
    ):
        race = Race(
            durable, plain, home, jobs=plan.jobs, rounds=plan.rounds, seconds=plan.seconds, probe_jobs=plan.probe_jobs,
            grid=plan.grid,
        )  # fmt: skip
        for workers in plan.workers:
            await race.run(workers)
        facts = ping(broker_config(durable))
        name = str(facts.get("server_name", "redis"))
        return {
            **race_fields(race.outcome),
            **await _idle(plan.idle_jobs, durable, home),
            **await bulk_enqueue(client, plan.bulk_jobs),
            **await commits(client, plan.commit_kb, plan.commit_s),
            **await claims(client, plan.depths, plan.claims),
            **await deaths(client, url, home, plan.death_workers, plan.death_jobs, plan.death_job_s),
            "rounds": plan.rounds,
            "broker": f"{name} {facts.get(f'{name}_version', facts.get('redis_version'))}",
            "aof": {name: "everysec" if name == "ours" else "off" for name in SYSTEMS} | {"calls": "everysec"},
            "ours": {"max_jobs": MAX_JOBS},
        }


def race_fields(race: Outcome) -> dict[str, Any]:
    """What the rounds come to; a system that did not race is null."""
    rates = race.rates
    medians = {name: {count: median(each) for count, each in by.items()} for name, by in rates.items()}
    return {
        **{f"{name}_jobs_s": _by_count(medians[name]) if name in medians else None for name in SYSTEMS},
        "ours_vs_arq_best": ratio(rates, "arq_best"),
        "ours_vs_arq": ratio(rates, "arq"),
        "claims_per_job": _by_count(race.claims_per_job),
        "claim_calls_per_job": _by_count(race.claim_calls_per_job),
        "ours_worker_us": _by_count({count: median(each) for count, each in race.worker_us.items()}),
        "ours_broker_us": _by_count({count: median(each) for count, each in race.broker_us.items()}),
        "spread": {name: _by_count({count: spread(each) for count, each in by.items()}) for name, by in rates.items()},
        "jobs": {name: _by_count(by) for name, by in race.jobs.items()},
        "arq_best": _by_count(race.best),
        "arq_grid": _by_count(race.grid),
    }


def ratio(rates: Mapping[str, Mapping[int, list[float]]], other: str) -> float | None:
    """Median of ours over the other's, round by round, at 2 workers; None without such rounds."""
    ours, theirs = (rates.get(name, {}).get(_AIM_AT) for name in ("ours", other))
    if not ours or not theirs:
        return None
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _by_count(by: Mapping[int, Any]) -> dict[str, Any]:
    return {str(count): value for count, value in by.items()}


async def _idle(jobs: int, url: str, home: Path) -> dict[str, float]:
    """Milliseconds."""
    ours, gaps = Ours(url, "idle"), random.Random(0)
    try:
        async with Fleet("idle", home) as fleet:
            await ours.start(1, fleet)
            fleet.resume()
            for number in range(_IDLE_WARM + jobs):
                await asyncio.sleep(gaps.uniform(*_IDLE_GAP_S))
                call = Call(job_id=f"idle:{number}", function="mark", args=(time.time(),))
                await ours.queue.enqueue_calls([call])
            await asyncio.sleep(_IDLE_SETTLE_S)
            (totals,) = await ours.totals(fleet)
    finally:
        await ours.close()
    waits_ms = [1000 * wait_s for wait_s in totals.waits_s[_IDLE_WARM:]]
    if len(waits_ms) != jobs:
        raise SluiceError(f"{len(waits_ms)} of {jobs} idle jobs were started")
    found = {"idle_p50_ms": percentile(waits_ms, 0.5), "idle_p99_ms": percentile(waits_ms, 0.99)}
    say(f"idle: enqueue to start p50 {found['idle_p50_ms']:.2f} ms, p99 {found['idle_p99_ms']:.2f} ms")
    return found
