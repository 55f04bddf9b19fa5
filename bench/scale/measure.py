"""The three parts one after the other, each on a broker of its own, and the fields of the JSON object."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from sluice.bench.interruptible import run_interruptible
from sluice.bench.queue.worker import broker_config
from sluice.bench.scale.flow import flow
from sluice.bench.scale.idle import idle
from sluice.bench.scale.plan import HOME, Plan
from sluice.bench.scale.queued import queued
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `redis_bytes_per_queued_job`: with credit lifted. `claim_us`, `renewal_share`: of many workers that lease 32 jobs
    each of that queue. `us_per_sequence`: mean time of the last hundredth of the sequences at each mark, in one run.
    `cpu_us_per_sequence`: processor time of each role between the last two marks.
    `rss_growth_share`: of each role, from the second mark to the last. `redis_bytes_end`: once the run is over.
    `idle_broker_share_100_workers`: of one core, by `idle_workers` workers without a job.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        return run_interruptible(_run(plan, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _run(plan: Plan, home: Path) -> dict[str, Any]:
    async with _broker(home / "idle") as (client, url):
        found: dict[str, Any] = await idle(plan, client, url, home)
    async with _broker(home / "queued", durable=False) as (client, url):
        found |= await queued(plan, client)
    async with _broker(home / "flow") as (client, url):
        found |= await flow(plan, client, url, home)
    return found


@contextlib.asynccontextmanager
async def _broker(directory: Path, *, durable: bool = True) -> AsyncGenerator[tuple[Any, str]]:
    with embedded_broker(BrokerConfig(embedded_dir=str(directory))) as url:
        client: Any = connect(broker_config(url))
        try:
            if not durable:
                await client.config_set("appendonly", "no")
            yield client, url
        finally:
            await client.aclose()
