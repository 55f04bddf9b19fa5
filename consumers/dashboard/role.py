"""The composition root of a dashboard process.

| waits for | unblocked by |
|-----------|--------------|
| requests  | a browser    |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from consumers.dashboard.app import make_app
from consumers.dashboard.auth import KEY_NAME, check_host
from consumers.dashboard.look import Look
from consumers.history.files import history_directory
from consumers.history.reader import HistoryReader
from pipeline.config.types import Config
from pipeline.http.server import serve
from pipeline.logs import get_logger
from pipeline.run.role import Role, default_name, role_process

_GRACE_S = 3.0


async def dashboard(config: Config, *, allow_actions: bool, stop: asyncio.Event | None = None) -> None:
    """Serve until asked to stop, by a signal or by the given event. Raises ConfigError."""
    key = os.environ.get(KEY_NAME) or None
    check_host(config.dashboard, key)
    async with role_process(config, "dashboard", default_name("dashboard"), stop) as role:
        await run_dashboard(role, key, allow_actions=allow_actions)


async def run_dashboard(
    role: Role, key: str | None, *, allow_actions: bool, on_ready: Callable[[int], object] = bool
) -> None:
    """The dashboard inside a role."""
    config, reader = role.config.dashboard, HistoryReader(history_directory(role.config))
    look = Look(role.config, role.client, reader)
    role.spawn(look.run())
    role.spawn(_close_streams(role, look))

    def ready(port: int) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        role.status.fact(url=f"http://{host}:{port}")
        role.status.waiting("requests")
        get_logger().info("dashboard ready", url=f"http://{host}:{port}")
        on_ready(port)

    app = make_app(look, key, allow_actions=allow_actions or config.allow_actions)
    try:
        await serve(app, host=config.host, port=config.port, stop=role.stop, grace_s=_GRACE_S, on_ready=ready)
    finally:
        reader.close()


async def _close_streams(role: Role, look: Look) -> None:
    """Streams have no end of their own, and would use up the grace time."""
    await role.stop.wait()
    look.close()
