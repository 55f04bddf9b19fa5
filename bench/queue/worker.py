"""One worker process of ours: `python -m bench.queue.worker NAME RUN`, the broker in REDIS_URL, until SIGTERM.

It says `ready`, serves, and at its end prints its totals as one JSON line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import msgspec

from sluice.bench.queue.noop import noop, ready
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.logs import configure
from sluice.pipeline.queue import ArqWorker, Claimed
from sluice.pipeline.wire.keys import Keys

MAX_JOBS = 100  # as many as one claim brings
PAUSED_S = 120.0  # a process that was stopped meanwhile must not take its connections for dead


class Totals(msgspec.Struct):
    """What one worker did: jobs that claims brought, claims that brought any, ended jobs, seconds that jobs waited."""

    claimed: int = 0
    claims: int = 0
    complete: int = 0
    waits_s: list[float] = []


def broker_config(url: str) -> BrokerConfig:
    """How this benchmark's processes connect."""
    return BrokerConfig(url=url, socket_timeout_s=PAUSED_S)


async def mark(ctx: dict[Any, Any], sent_at: float) -> None:
    """Notes how long ago it was sent (Unix seconds)."""
    ctx["totals"].waits_s.append(time.time() - sent_at)


async def serve(url: str, name: str, run: str) -> Totals:
    """Until SIGTERM."""
    config = Config(run=run, broker=broker_config(url))
    totals = Totals()
    client = connect(config.broker)

    def count(got: Claimed) -> None:
        totals.claimed += len(got.claims)
        totals.claims += bool(got.claims)

    worker = ArqWorker(
        [noop, mark],
        client=client,
        keys=Keys(run),
        config=config,
        name=name,
        max_jobs=MAX_JOBS,
        on_startup=ready,
        ctx={"totals": totals},
        on_claim=count,
    )
    await worker.main()
    await worker.close()
    await client.aclose()
    totals.complete = worker.arq.jobs_complete
    return totals


if __name__ == "__main__":
    configure("bench")
    _totals = asyncio.run(serve(os.environ["REDIS_URL"], *sys.argv[1:]))
    print(msgspec.json.encode(_totals).decode(), flush=True)
