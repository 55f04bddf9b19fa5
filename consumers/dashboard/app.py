"""The dashboard's process and its ASGI application.

    request ─▶ SafeHeaders ─▶ Gate ─▶ HostGate ─▶ BodyLimit ─▶ routes ─▶ Monitor, HistoryReader

- A page module has a `router` and is listed in `PAGES`; its templates extend templates/base.html.j2.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from sluice import __version__
from sluice.consumers.dashboard import dead_letters, jobs, live, overview, sequences, settings, workers
from sluice.consumers.dashboard.auth import KEY_NAME, Gate, SafeHeaders, check_host
from sluice.consumers.dashboard.live import Live
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.render import STATIC, add_problem_pages
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import Config
from sluice.pipeline.http.middleware import BodyLimit, HostGate
from sluice.pipeline.http.server import serve
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.wire.waits import WaitKind

PAGES = (overview, jobs, sequences, workers, dead_letters, settings, live)
_GRACE_S = 3.0


def make_app(monitor: Monitor, key: str | None = None, *, allow_actions: bool = False) -> ASGIApp:
    """`key`: required of every request but /health; None: only this machine has access, see auth.py."""
    config = monitor.config.dashboard
    app = FastAPI(title="Sluice dashboard", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.monitor, app.state.allow_actions = monitor, allow_actions
    app.state.live, app.state.run_config = Live(monitor), settings.RunConfig(monitor.config)
    app.add_middleware(BodyLimit, max_bytes=int(config.max_body_mb * (1 << 20)))
    app.add_middleware(HostGate, names=config.hosts, setting="dashboard.hosts", has_key=key is not None)
    app.add_middleware(Gate, key=key)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/health", lambda: _health(monitor))
    for page in PAGES:
        app.include_router(page.router)
    add_problem_pages(app)
    return SafeHeaders(app)  # not a middleware: the page for an unexpected error is made outside of those


def _health(monitor: Monitor) -> JSONResponse:
    healthy = monitor.problem is None
    answer = {"status": "healthy" if healthy else "unavailable", "service": "dashboard", "waiting_for": monitor.problem}
    return JSONResponse(answer, 200 if healthy else 503)


async def dashboard(config: Config, *, allow_actions: bool, stop: asyncio.Event | None = None) -> None:
    """Serve until asked to stop, by a signal or by the given event. Raises ConfigError."""
    key = os.environ.get(KEY_NAME) or None
    check_host(config.dashboard, key)
    async with role_process(config, "dashboard", default_name("dashboard"), stop) as role:
        await run_dashboard(role, key, allow_actions=allow_actions)


async def run_dashboard(
    role: Role, key: str | None, *, allow_actions: bool, on_ready: Callable[[int], object] = bool
) -> None:
    """The dashboard inside an existing role."""
    config, reader = role.config.dashboard, HistoryReader(history_directory(role.config))
    monitor = Monitor(role.config, role.client, reader)
    role.spawn(monitor.run())
    role.spawn(_close_streams(role, monitor))

    def ready(port: int) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        role.status.fact(url=f"http://{host}:{port}")
        role.status.waiting(WaitKind.REQUESTS)
        get_logger().info("dashboard ready", url=f"http://{host}:{port}")
        on_ready(port)

    app = make_app(monitor, key, allow_actions=allow_actions or config.allow_actions)
    try:
        await serve(app, host=config.host, port=config.port, stop=role.stop, grace_s=_GRACE_S, on_ready=ready)
    finally:
        reader.close()


async def _close_streams(role: Role, monitor: Monitor) -> None:
    """Streams never end by themselves, and would use up the grace time."""
    await role.stop.wait()
    monitor.close()
