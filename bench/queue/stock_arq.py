"""arq's own command, with its own worker: `arq sluice.bench.queue.stock_arq.settings`; settings in BENCH_SETTINGS."""

from __future__ import annotations

import json
import os
from typing import Any

from sluice.bench.queue.noop import noop, ready
from sluice.pipeline.queue import arq_redis_settings

settings: dict[str, Any] = {
    "functions": [noop],
    "redis_settings": arq_redis_settings(os.environ["REDIS_URL"]),
    "on_startup": ready,
    **json.loads(os.environ["BENCH_SETTINGS"]),
}
quiet: dict[str, Any] = {"version": 1}
"""For --custom-log-dict: arq logs two lines a job otherwise."""
