"""What arq's and SAQ's own commands are started with: `arq sluice.bench.queue.stock.arq_settings`, `saq
sluice.bench.queue.stock.saq_settings`, the broker in REDIS_URL, arq's settings in BENCH_SETTINGS.

SAQ is installed for benchmarks only (the extra `bench`).
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from sluice.pipeline.queue import arq_redis_settings


async def noop(_ctx: Any) -> None:
    """The job that every system runs."""


async def ready(_ctx: Any) -> None:
    """Tell the parent that this worker serves."""
    print("ready", flush=True)


arq_settings: dict[str, Any] = {
    "functions": [noop],
    "redis_settings": arq_redis_settings(os.environ["REDIS_URL"]),
    "on_startup": ready,
    **json.loads(os.environ["BENCH_SETTINGS"]),
}
quiet: dict[str, Any] = {"version": 1}
"""For --custom-log-dict: arq logs two lines a job otherwise."""


def saq_settings() -> dict[str, Any]:
    queue = importlib.import_module("saq").Queue.from_url(os.environ["REDIS_URL"])
    return {"queue": queue, "functions": [noop], "startup": ready}
