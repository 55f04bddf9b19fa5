"""The composition root of a rollout server process.

- A signal begins the drain: /health says so, new rollouts are refused, those in hand have most of `up.stop_grace_s`,
  and are then handed back, or ended as errors where the caller is called back; only then does the server close.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from pipeline import logs
from pipeline.config.types import Config
from pipeline.http.server import serve
from pipeline.logs import get_logger
from pipeline.loop_watch import watch_loop
from pipeline.run.role import default_name, leave_within
from pipeline.telemetry.exporter import metrics_server
from producers.rollout.app_state import app_state
from producers.rollout.runs import Runs, open_runs
from producers.rollout.server import build_app
from producers.rollout.trainer_client import Retries

KEY_VARIABLE = "SLUICE_ROLLOUT_API_KEY"
_DRAIN_SHARE, _ENDING_SHARE = 0.6, 0.3  # of the grace: for those in hand, and for saying how the others ended
_CLOSE_S = 2.0


async def serve_rollouts(config: Config, index: int = 0) -> int | None:
    """Serve until a signal, whose number is returned."""
    name = default_name("rollout-server")
    logs.configure(name)
    drain, caught = asyncio.Event(), list[int]()

    def on_signal(number: int) -> None:
        caught.append(number)
        drain.set()
        leave_within(config.up.stop_grace_s, name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve_until(config, drain, port=config.rollout_server.port + index, key=os.environ.get(KEY_VARIABLE) or None)
    return caught[0] if caught else None


async def serve_until(
    config: Config,
    drain: asyncio.Event,
    *,
    port: int,
    key: str | None = None,
    retries: Retries | None = None,
    on_ready: Callable[[int], object] | None = None,
) -> None:
    """Serve until `drain` is set and all is done. Port 0 takes a free one, which `on_ready` is told."""
    settings, grace_s = config.rollout_server, config.up.stop_grace_s

    def ready(actual: int) -> None:
        get_logger().info("rollout server ready", host=settings.host, port=actual, tools=len(state.tools.schemas()))
        if on_ready is not None:
            on_ready(actual)

    async with app_state(config, retries) as state, open_runs(state) as runs, asyncio.TaskGroup() as tasks:
        closed = asyncio.Event()
        beside = [_drained(runs, drain, closed, grace_s), state.tokenizers.warm()]
        helpers = [tasks.create_task(one) for one in beside]
        app = build_app(state, runs, key=key)
        with watch_loop(), metrics_server(config.metrics, state.counters.telemetry) as address:
            get_logger().info("metrics", address=address)
            await serve(app, host=settings.host, port=port, stop=closed, grace_s=_CLOSE_S, on_ready=ready)
        for helper in helpers:
            helper.cancel()


async def _drained(runs: Runs, drain: asyncio.Event, closed: asyncio.Event, grace_s: float) -> None:
    await drain.wait()
    get_logger().info("rollout server drains", grace_s=grace_s)
    await runs.drain(_DRAIN_SHARE * grace_s, _ENDING_SHARE * grace_s)
    closed.set()
