"""Every page of the dashboard, as a browser asks for it, from a process of its own.

Pages take turns, so that none of them is asked twice in a row; a browser beside them keeps the live stream open.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from sluice.bench.operate.plan import Plan
from sluice.bench.percentile import percentile
from sluice.bench.processes import Fleet
from sluice.bench.report import say
from sluice.bench.rollout.http import open_session
from sluice.bench.rollout.stack import free_ports, until_healthy
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue.dead_letters import DeadLetters
from sluice.pipeline.run.supervisor import sluice_command

_WARM = 2


async def pages(plan: Plan, config: Config, client: Any, resolved: Path, home: Path) -> dict[str, Any]:
    """Milliseconds by page: `dashboard_p50_ms`, `dashboard_p95_ms`; the latter's worst is `dashboard_p95_ms_max`."""
    paths = await _paths(config, client)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with Fleet("dashboard", home) as fleet, open_session() as session:
        command = sluice_command("dashboard", "-c", str(resolved), "--set", f"dashboard.port={port}")
        await fleet.start(command, {"REDIS_URL": config.broker.url or "", "SLUICE_DASHBOARD_KEY": ""})
        await until_healthy(session, url, fleet)
        async with _live(session, url):
            times: dict[str, list[float]] = {name: [] for name in paths}
            for turn in range(plan.requests + _WARM):
                for name, path in paths.items():
                    took_ms = await _ask(session, url + path)
                    if turn >= _WARM:
                        times[name].append(took_ms)
    p50, p95 = ({name: percentile(each, share) for name, each in times.items()} for share in (0.5, 0.95))
    worst = max(p95, key=lambda name: p95[name])
    say(f"dashboard: the slowest page is {worst}, p95 {p95[worst]:.1f} ms with {plan.finished} finished sequences")
    return {"dashboard_p95_ms": p95, "dashboard_p50_ms": p50, "dashboard_p95_ms_max": p95[worst]}


async def _paths(config: Config, client: Any) -> dict[str, str]:
    reader = HistoryReader(history_directory(config))
    try:
        newest = reader.sequences(SequenceFilter(), limit=50)
        middle = newest.rows[len(newest.rows) // 2]
    finally:
        reader.close()
    letters = [row.letter.seq_id async for row in DeadLetters(client, config).rows()]
    part = quote(middle.job_id.rpartition(":")[2][:6])
    return {
        "overview": "/",
        "jobs": "/jobs",
        "jobs, searched": f"/jobs?search={part}",
        "job": f"/jobs/{quote(middle.job_id, safe=':')}",
        "sequences": "/sequences",
        "sequences, filtered": "/sequences?finish_reason=length&triggered=yes",
        "sequences, searched": f"/sequences?search={part}",
        "sequences, next page": f"/sequences?before={quote(newest.next)}",
        "sequence": f"/sequences/{quote(middle.seq_id, safe=':')}",
        "workers": "/workers",
        "weights": "/weights",
        "dead letters": "/dead-letters",
        "dead letter": f"/dead-letters/{quote(letters[-1], safe=':')}",
        "config": "/config",
    }


async def _ask(session: aiohttp.ClientSession, url: str) -> float:
    started = time.monotonic()
    async with session.get(url) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise SluiceError(f"{url}: {answer.status}: {body[:300]!r}")
    return (time.monotonic() - started) * 1000


@contextlib.asynccontextmanager
async def _live(session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """A browser that shows the overview."""
    async with session.get(f"{url}/events", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        task = asyncio.create_task(_read(stream))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _read(stream: aiohttp.ClientResponse) -> None:
    async for _ in stream.content.iter_any():
        pass
