"""Throughput of the same pipeline with metrics that are scraped every second, and without metrics.

- Either side has a broker and workers of its own; those that are not measured are stopped (SIGSTOP).
- Rounds take turns; a ratio is that of two rounds over the same jobs. The workers' processor time is compared as well:
  it is steadier on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from sluice.bench.operate.plan import Plan
from sluice.bench.pipeline import load
from sluice.bench.pipeline import plan as pipeline_plan
from sluice.bench.pipeline.stats import Sample
from sluice.bench.pipeline.through_queue import QueuedEngines
from sluice.bench.processes import Fleet
from sluice.bench.report import say
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import SluiceError

_SCRAPE_EVERY_S = 1.0
_ASK_S = 5.0
_WARM = 64


class Side:
    """Workers with metrics or without."""

    def __init__(self, name: str, engines: QueuedEngines, fleet: Fleet) -> None:
        self.name, self._engines, self._fleet = name, engines, fleet

    async def start(self, count: int) -> None:
        """Ready and warm, then stopped."""
        await self._engines.start()
        await self.round("warm", count)
        self._fleet.pause()

    async def addresses(self) -> list[str]:
        """Where the workers' metrics are."""
        return [facts["metrics"] for facts in await self._engines.serving()]

    async def round(self, name: str, count: int) -> Sample:
        """Running for its own round alone."""
        self._fleet.resume()
        sample, _ = await self._engines.round(load.jobs(name, count, digits=True))
        self._fleet.pause()
        return sample


async def overhead(plan: Plan, home: Path, urls: tuple[str, str]) -> dict[str, Any]:
    """The fields of the JSON object: `metrics_overhead` is 1 - (tokens/s with) / (tokens/s without), the median."""
    settings = pipeline_plan.Plan.of(
        sequences=plan.sequences, workers=plan.workers, rounds=plan.rounds, max_batch=32, model=None
    )
    async with contextlib.AsyncExitStack() as scope:
        sides = [
            await scope.enter_async_context(_side(settings, home, url, enabled))
            for url, enabled in zip(urls, (True, False), strict=True)
        ]
        for side in sides:
            await side.start(min(_WARM, plan.sequences))
        pairs = [await _pair(sides, number, plan.sequences) for number in range(plan.rounds)]
    wall = [1 - measured.tok_s / bare.tok_s for measured, bare in pairs]
    cpu = [measured.cpu_s / bare.cpu_s - 1 for measured, bare in pairs if bare.cpu_s]
    say(f"metrics: overhead {median(wall):.4f} by tokens/s, {median(cpu):.4f} by processor time")
    return {
        "metrics_overhead": median(wall),
        "metrics_overhead_range": [min(wall), max(wall)],
        "metrics_overhead_cpu": median(cpu),
        "metrics_overhead_cpu_range": [min(cpu), max(cpu)],
        "tok_s_with_metrics": median(measured.tok_s for measured, _ in pairs),
        "tok_s_without": median(bare.tok_s for _, bare in pairs),
    }


@contextlib.asynccontextmanager
async def _side(settings: pipeline_plan.Plan, home: Path, url: str, enabled: bool) -> AsyncIterator[Side]:
    name = "with-metrics" if enabled else "without"
    client = connect(BrokerConfig(url=url))
    try:
        async with Fleet(name, home) as fleet:
            more = [f"metrics.enabled={str(enabled).lower()}"]
            yield Side(name, QueuedEngines(settings, fleet, client, url, more), fleet)
    finally:
        await client.aclose()


async def _pair(sides: list[Side], number: int, count: int) -> tuple[Sample, Sample]:
    """(with metrics, without), in turns first."""
    found: dict[str, Sample] = {}
    for side in sides if number % 2 else reversed(sides):
        async with _scraped(side):
            found[side.name] = await side.round(f"round-{number}", count)
    measured, bare = (found[side.name] for side in sides)
    if measured.num_tokens != bare.num_tokens:
        raise SluiceError(f"{measured.num_tokens} tokens with metrics, {bare.num_tokens} without; no ratio is fair")
    return measured, bare


@contextlib.asynccontextmanager
async def _scraped(side: Side) -> AsyncIterator[None]:
    """Its workers are asked for their metrics once a second, as far as they have any."""
    if side.name == "without":
        yield
        return
    addresses = await side.addresses()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as session:
        task = asyncio.create_task(_scrape(session, addresses))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()


async def _scrape(session: aiohttp.ClientSession, addresses: list[str]) -> None:
    while True:
        await asyncio.sleep(_SCRAPE_EVERY_S)
        for address in addresses:
            async with session.get(f"http://{address}/metrics") as answer:
                answer.raise_for_status()
                await answer.read()
