"""The three parts one after the other, each on a broker of its own, and the fields of the JSON object."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.bench.broker import CHUNK, broker_config, broker_s, enqueue, in_flight, own_broker, used_bytes
from sluice.bench.child import Parent
from sluice.bench.harness import HOME, own_directory, run_interruptible, say
from sluice.bench.models import demo_model
from sluice.bench.processes import Fleet
from sluice.bench.queue.calls import decode_job
from sluice.bench.scale.flow import Marks, flow
from sluice.pipeline import logs
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue import NO_LIMIT, ArqWorker, Claim, JobQueue
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.wire.keys import Keys

_LEAST = 1000
_QUEUED, _IDLE = "queued", "idle"  # names of runs
_LEASE_S, _EACH, _MOST_DEATHS = 3600.0, 32, 3
_RENEW_S = 5.0  # of worker.renew_s
_START_S, _SETTLE_S = 60.0, 3.0


@dataclass(frozen=True)
class Plan:
    """`count` jobs are queued, and as many sequences go through a run."""

    count: int
    workers: int
    idle_s: float
    model: Path

    @classmethod
    def of(cls, *, count: int, workers: int, idle_s: float) -> Plan:
        """Checked; the model is made when it is not there yet. Raises ConfigError."""
        if count < _LEAST or workers < 1 or idle_s <= 0:
            raise ConfigError(f"--count must be at least {_LEAST}, --workers 1, and --idle-s more than 0")
        return cls(count, workers, idle_s, demo_model(HOME))


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `redis_bytes_per_queued_job`: with credit lifted. `claim_us`, `renewal_share`: of many workers that lease 32 jobs
    each of that queue. `us_per_sequence`: mean time of the last hundredth of the sequences at each mark, in one run.
    `cpu_us_per_sequence`: processor time of each role between the last two marks.
    `rss_growth_share`: of each role, from the second mark to the last. `redis_bytes_end`: once the run is over.
    `idle_broker_share_100_workers`: of one core, by `idle_workers` workers without a job.
    """
    with own_directory() as home:
        return run_interruptible(_run(plan, home))


async def _run(plan: Plan, home: Path) -> dict[str, Any]:
    async with own_broker(home / "idle") as (client, url):
        found: dict[str, Any] = await _idle(plan, client, url, home)
    async with own_broker(home / "queued", durable=False) as (client, url):
        found |= await _queued(plan, client)
    async with own_broker(home / "flow") as (client, url):
        return found | await flow(Marks(plan.count), plan.model, client, url, home)


async def _queued(plan: Plan, client: Any) -> dict[str, float]:
    """Bytes of a job in the queue; what claims of `workers` workers take then, and the renewal of what they hold."""
    queue = JobQueue(client, Keys(_QUEUED))
    before, started = await used_bytes(client), time.perf_counter()

    async def put(begin: int) -> None:
        jobs = [decode_job(_QUEUED, number) for number in range(begin, min(begin + CHUNK, plan.count))]
        await enqueue(queue, jobs, NO_LIMIT)

    await in_flight(put(begin) for begin in range(0, plan.count, CHUNK))
    per_job = (await used_bytes(client) - before) / plan.count
    say(f"{plan.count:,} jobs queued in {time.perf_counter() - started:.0f} s, {per_job:.0f} bytes each")
    holders = [JobQueue(client, Keys(_QUEUED), worker=f"w{number}") for number in range(plan.workers)]
    held: list[list[Claim]] = []
    started = time.perf_counter()
    for holder in holders:
        held.append((await holder.claim(_EACH, _LEASE_S, _MOST_DEATHS)).claims)
    claims_s, started = time.perf_counter() - started, time.perf_counter()
    for holder, claims in zip(holders, held, strict=True):
        await holder.renew(_LEASE_S, {claim.job_id: claim.attempt for claim in claims})
    renewals_s = time.perf_counter() - started
    return {
        "redis_bytes_per_queued_job": per_job,
        "leased_jobs": sum(map(len, held)),
        "claim_us": 1e6 * claims_s / plan.workers,
        "renewal_share": renewals_s / _RENEW_S,
    }


async def _idle(plan: Plan, client: Any, url: str, home: Path) -> dict[str, float]:
    """Share of one core that the broker uses."""
    async with Fleet("idle", home) as fleet:
        await fleet.start_child(serve_idle, [url, plan.workers])
        await fleet.receive(str, _START_S)
        await asyncio.sleep(_SETTLE_S)
        before = await broker_s(client)
        await asyncio.sleep(plan.idle_s)
        share = (await broker_s(client) - before) / plan.idle_s
        fleet.check()
    say(f"{plan.workers} idle workers: {share:.4f} of a core in the broker")
    return {"idle_broker_share_100_workers": share, "idle_workers": plan.workers, "idle_s": plan.idle_s}


async def serve_idle(parent: Parent, url: str, workers: int) -> None:
    """A process of workers that wait, until SIGTERM.

    Each has connections, a lease keeper and a heartbeat of its own, as a worker process has.
    """
    logs.configure("bench")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = Config(run=_IDLE, broker=broker_config(url))
    tasks = [asyncio.create_task(_wait(config, f"worker-{number}", stop)) for number in range(workers)]
    parent.tell("ready")
    await asyncio.gather(*tasks)


async def _wait(config: Config, name: str, stop: asyncio.Event) -> None:
    client, keys = connect(config.broker), Keys(config.run)
    beating = asyncio.create_task(StatusReporter(client, keys, "worker", name).run())
    worker = ArqWorker([_nothing], client=client, keys=keys, config=config, name=name, stop=stop, handle_signals=False)
    await worker.main()
    beating.cancel()
    await asyncio.wait({beating})
    await client.aclose()


async def _nothing(_ctx: Any) -> None:
    """What nobody asks for."""
