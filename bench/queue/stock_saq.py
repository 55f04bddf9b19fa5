"""SAQ's own command, with its own worker and its defaults: `saq sluice.bench.queue.stock_saq.settings`.

SAQ is installed for benchmarks only (the extra `bench`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from sluice.bench.queue.noop import noop, ready

MISSING = "SAQ is not installed, saq_jobs_s is null; to have it: pip install 'sluice[bench]'"


def is_installed() -> bool:
    """Whether this Python has SAQ."""
    return importlib.util.find_spec("saq") is not None


def saq_queue(url: str) -> Any:
    """Its queue, for a client or a worker."""
    return importlib.import_module("saq").Queue.from_url(url)


def settings() -> dict[str, Any]:
    """For its command."""
    return {"queue": saq_queue(os.environ["REDIS_URL"]), "functions": [noop], "startup": ready}
