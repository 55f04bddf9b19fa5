"""A queue as long as it gets, credit lifted, and the leases of many workers over it."""

from __future__ import annotations

import time
from typing import Any

from sluice.bench.queue.calls import decode_job
from sluice.bench.queue.in_flight import in_flight
from sluice.bench.report import say
from sluice.bench.scale.plan import Plan
from sluice.pipeline.broker.connection import Scripts
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import NO_LIMIT, Claim, JobQueue
from sluice.pipeline.wire.keys import Keys

_RUN, _CHUNK, _LEASE_S, _EACH = "queued", 100, 3600.0, 32
_RENEW_S = 5.0  # of worker.renew_s


async def queued(plan: Plan, client: Any) -> dict[str, float]:
    """Bytes of a job in the queue; what claims of `workers` workers take then, and the renewal of what they hold."""
    queue = JobQueue(client, Keys(_RUN))
    before, started = await used_bytes(client), time.perf_counter()

    async def put(begin: int) -> None:
        jobs = [decode_job(_RUN, number) for number in range(begin, min(begin + _CHUNK, plan.count))]
        if set(outcomes := await queue.enqueue(jobs, NO_LIMIT)) != {"enqueued"}:
            raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")

    await in_flight(put(begin) for begin in range(0, plan.count, _CHUNK))
    per_job = (await used_bytes(client) - before) / plan.count
    say(f"{plan.count:,} jobs queued in {time.perf_counter() - started:.0f} s, {per_job:.0f} bytes each")
    scripts = Scripts(client)
    holders = [JobQueue(client, Keys(_RUN), worker=f"w{number}") for number in range(plan.workers)]
    held: list[list[Claim]] = []
    started = time.perf_counter()
    for holder in holders:
        held.append((await holder.claim(_EACH, _LEASE_S, 3)).claims)
    claims_s, started = time.perf_counter() - started, time.perf_counter()
    for holder, claims in zip(holders, held, strict=True):
        keys, args = holder.renewal(_LEASE_S, {claim.job_id: claim.attempt for claim in claims})
        await scripts.run("renew", keys, args)
    renewals_s = time.perf_counter() - started
    return {
        "redis_bytes_per_queued_job": per_job,
        "leased_jobs": sum(map(len, held)),
        "claim_us": 1e6 * claims_s / plan.workers,
        "renewal_share": renewals_s / _RENEW_S,
    }


async def used_bytes(client: Any) -> int:
    """Memory that the broker has given out."""
    return int((await client.info("memory"))["used_memory"])
