"""Everything in one run, on brokers of one program, and the fields of the JSON object."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sluice.bench.interruptible import run_interruptible
from sluice.bench.queue import calls
from sluice.bench.queue.deaths import deaths
from sluice.bench.queue.idle import idle
from sluice.bench.queue.plan import Plan
from sluice.bench.queue.race import Outcome, Race
from sluice.bench.queue.stock_saq import MISSING, is_installed
from sluice.bench.queue.worker import MAX_JOBS, broker_config
from sluice.bench.report import say
from sluice.pipeline.broker.connection import connect, connect_sync, ping
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig

HOME = Path(".sluice/bench")
SYSTEMS = ("ours", "arq", "arq_best", "saq")
_AIM_AT = 2  # workers at which the systems are compared


@dataclass(frozen=True)
class Brokers:
    """Addresses of one program, started three times."""

    durable: str  # AOF everysec: ours
    plain: str  # no AOF: the others
    calls: str  # AOF everysec: one client's calls


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `*_jobs_s`: median of the rounds, by worker processes. `claims_per_job`: jobs that claims brought, over jobs: a
    job that two workers took counts twice; `claim_calls_per_job`: claims that brought any. `ours_vs_*`: median of the
    rounds' ratios at 2 workers. `ours_worker_us`, `ours_broker_us`: processor time a job. `spread`: slowest and
    fastest round. `aof`: what each system's broker wrote to disk. `deaths`: by workers, the time of
    `deaths_jobs` jobs of `deaths_job_s` seconds, without kills (`quiet_s`) and with `deaths_kills` (`killed_s`).
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME))
    try:
        with _brokers(home) as brokers:
            return run_interruptible(_run(plan, brokers, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _brokers(home: Path) -> Iterator[Brokers]:
    with contextlib.ExitStack() as scope:
        names = ("durable", "plain", "calls")
        urls = [scope.enter_context(embedded_broker(BrokerConfig(embedded_dir=str(home / name)))) for name in names]
        found = Brokers(*urls)
        with connect_sync(broker_config(found.plain)) as client:
            client.config_set("appendonly", "no")
        yield found


async def _run(plan: Plan, brokers: Brokers, home: Path) -> dict[str, Any]:
    if not is_installed():
        say(MISSING)
    client = connect(broker_config(brokers.calls))
    try:
        race = await Race(plan, brokers.durable, brokers.plain, home).run()
        return {
            **race_fields(race),
            **await idle(plan, brokers.durable, home),
            **await calls.bulk_enqueue(plan, client),
            **await calls.commits(plan, client),
            **await calls.claims(plan, client),
            **await deaths(plan, client, brokers.calls, home),
            **_conditions(plan, brokers),
        }
    finally:
        await client.aclose()


def race_fields(race: Outcome) -> dict[str, Any]:
    """What the rounds come to; a system that did not race is null."""
    rates = race.rates
    return {
        **{f"{name}_jobs_s": _by_count(rates.get(name), median) for name in SYSTEMS},
        "ours_vs_arq_best": ratio(rates, "arq_best"),
        "ours_vs_arq": ratio(rates, "arq"),
        "claims_per_job": _by_count(race.claims_per_job),
        "claim_calls_per_job": _by_count(race.claim_calls_per_job),
        "ours_worker_us": _by_count(race.worker_us, median),
        "ours_broker_us": _by_count(race.broker_us, median),
        "spread": {name: _by_count(by, lambda each: [min(each), max(each)]) for name, by in rates.items()},
        "jobs": {name: _by_count(by) for name, by in race.jobs.items()},
        "arq_best": _by_count(race.best),
        "arq_grid": _by_count(race.grid),
    }


def ratio(rates: dict[str, dict[int, list[float]]], other: str) -> float | None:
    """Median of ours over the other's, round by round, at 2 workers; None without such rounds."""
    ours, theirs = (rates.get(name, {}).get(_AIM_AT) for name in ("ours", other))
    if not ours or not theirs:
        return None
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _by_count(by: dict[int, Any] | None, reduce: Any = lambda value: value) -> dict[str, Any] | None:
    return None if by is None else {str(count): reduce(value) for count, value in by.items()}


def _conditions(plan: Plan, brokers: Brokers) -> dict[str, Any]:
    facts = ping(broker_config(brokers.durable))
    name = str(facts.get("server_name", "redis"))
    return {
        "rounds": plan.rounds,
        "broker": f"{name} {facts.get(f'{name}_version', facts.get('redis_version'))}",
        "aof": {name: "everysec" if name == "ours" else "off" for name in SYSTEMS} | {"calls": "everysec"},
        "ours": {"max_jobs": MAX_JOBS},
    }
