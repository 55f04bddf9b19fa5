"""`arq workers.main.WorkerSettings` starts a worker too.

arq's command builds its own Worker, so these settings are a shim: it polls an empty private queue, while the
leased worker serves the real one from start-up to shutdown. The configuration comes from SLUICE_CONFIG.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from typing import Any

from pipeline.broker import broker_url
from pipeline.config import load_config
from pipeline.jobs import arq_redis_settings
from workers.role import work

_config = load_config(os.environ.get("SLUICE_CONFIG"))


async def never(ctx: dict[str, Any]) -> None:
    """The private queue's only function; nothing is ever put there."""


async def on_startup(ctx: dict[str, Any]) -> None:
    """Run the leased worker beside arq's loop; when it ends by itself, the process ends too."""
    ctx["stop"] = asyncio.Event()
    ctx["worker"] = asyncio.create_task(work(_config, ctx["stop"]))
    ctx["worker"].add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))


async def on_shutdown(ctx: dict[str, Any]) -> None:
    """Drain it; its error, if any, becomes that of the process."""
    ctx["stop"].set()
    await ctx["worker"]


class WorkerSettings:
    """What `arq` reads."""

    functions = (never,)
    queue_name = f"sluice:{_config.run}:arq-shim:{secrets.token_hex(6)}"
    redis_settings = arq_redis_settings(broker_url(_config.broker))
    on_startup = on_startup
    on_shutdown = on_shutdown
