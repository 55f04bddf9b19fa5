"""`arq sluice.workers.main.WorkerSettings` starts a worker too.

arq's command builds its own Worker, so these settings are a shim: it polls an empty private queue while the leased
worker serves the real one from start-up to shutdown. The configuration comes from SLUICE_CONFIG.

arq's own calls use our connections, because a broker outage must not end arq's loop either.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from typing import Any

from sluice.pipeline.broker.connection import broker_url, connect
from sluice.pipeline.config import load_config
from sluice.pipeline.queue import arq_pool, arq_redis_settings
from sluice.pipeline.run.role import default_name, leave_within
from sluice.pipeline.wire.keys import Keys
from sluice.workers.role import work

_config = load_config(os.environ.get("SLUICE_CONFIG"))
_queue = f"{Keys(_config.run).prefix}arq-shim:{secrets.token_hex(6)}"


async def never(ctx: dict[str, Any]) -> None:
    """The private queue's only function; nothing is ever enqueued there."""


async def on_startup(ctx: dict[str, Any]) -> None:
    """Run the leased worker beside arq's loop; when it ends by itself, so does the process."""
    ctx["stop"], arqs_loop = asyncio.Event(), asyncio.current_task()
    assert arqs_loop is not None, "arq awaits this in its main task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, ctx["stop"], arqs_loop)
    ctx["worker"] = asyncio.create_task(work(_config, ctx["stop"]))
    ctx["worker"].add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))


async def on_shutdown(ctx: dict[str, Any]) -> None:
    """Drain the worker; its error, if any, becomes the process's error."""
    ctx["stop"].set()
    await ctx["worker"]


def _stop(stop: asyncio.Event, arqs_loop: asyncio.Task[Any]) -> None:
    """Replaces arq's own handler, which would call a broker that's gone before it lets the worker drain."""
    if not stop.is_set():
        leave_within(_config.up.stop_grace_s, default_name("worker"))
    stop.set()
    arqs_loop.cancel()


class WorkerSettings:
    """The settings `arq` reads."""

    functions = (never,)
    queue_name = _queue
    redis_pool = arq_pool(connect(_config.broker, _config.run), _queue)
    # Only `arq --check` opens its own connection.
    redis_settings = (
        None
        if _config.broker.sentinel_master or _config.broker.cluster
        else arq_redis_settings(broker_url(_config.broker))
    )
    on_startup = on_startup
    on_shutdown = on_shutdown
