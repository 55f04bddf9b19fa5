"""The dashboard's process and its ASGI application.

    request ─▶ SafeHeaders ─▶ Gate ─▶ HostGate ─▶ BodyLimit ─▶ routes ─▶ Monitor, HistoryReader

- A page module has a `router` and is listed in `PAGES`; its templates extend templates/base.html.j2.
- With a key: HTTP Basic (any user name, the key as password) or a bearer token; compared in constant time.
- Without one, only this machine: the bound address is a loopback one (`check_host`), and so is the requested host
  name, or it is one of `dashboard.hosts` (pipeline/http/middleware.py).
- `/health` is open to everybody.
- `SafeHeaders`: nothing loads from elsewhere, nothing runs inline, and no other page may frame this one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice import __version__
from sluice.consumers.dashboard import dead_letters, jobs, overview, render, runs, sequences, workers
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.render import STATIC, Live, add_problem_pages
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.run_files import HISTORY
from sluice.pipeline.broker.embedded import is_running, is_stored, stored_at, stored_broker
from sluice.pipeline.config.types import Config, DashboardConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.http.errors import problem_response
from sluice.pipeline.http.middleware import OPEN_PATHS, BodyLimit, HostGate, is_loopback, with_unread_body
from sluice.pipeline.http.server import bind, open_listener, serve_on, url_of
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.wire.waits import WaitKind

PAGES = (overview, jobs, sequences, workers, dead_letters, runs, render)
_GRACE_S, _LOOK_S = 3.0, 2.0
_PORT_KEY = "dashboard.port"


def make_app(
    monitor: Monitor, key: str | None = None, *, allow_actions: bool = False, fleet_of: Config | None = None
) -> ASGIApp:
    """`key`: required of every request but /health; None: only this machine has access.

    `fleet_of`: the configuration with `worker.runs`, if this dashboard shows a fleet.
    """
    config = monitor.config.dashboard
    app = FastAPI(title="Sluice dashboard", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.monitor, app.state.allow_actions = monitor, allow_actions
    app.state.live = Live(monitor)
    app.state.fleet = None if fleet_of is None else runs.FleetLooks(fleet_of)
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


async def dashboard(
    config: Config,
    *,
    allow_actions: bool,
    stop: asyncio.Event | None = None,
    others: Sequence[Path] = (),
    directory: Path | None = None,
    fleet_of: Config | None = None,
) -> None:
    """Serve until asked to stop, by a signal or by the given event. Raises ConfigError.

    `others`: directories of runs to compare with; `directory`: of the run's files, if not where `config` says.
    `fleet_of`: as in `make_app`.
    """
    key = os.environ.get(KEY_NAME) or None
    check_host(config.dashboard, key)
    with contextlib.closing(listening(config.dashboard)) as listener:
        while True:  # once on what an ended broker stored, and again when it is back
            began = asyncio.Event()
            with stored_broker(config) as found:
                async with role_process(found, "dashboard", default_name("dashboard"), stop) as role:
                    at = stored_at(config) if is_stored(config, found) else None
                    if at is not None and stop is None:
                        role.spawn(_until_it_runs(role, config, began))
                    ours = listener.dup()  # closed by the server
                    await run_dashboard(
                        role,
                        key,
                        allow_actions=allow_actions,
                        others=others,
                        listener=ours,
                        stored_at=at,
                        directory=directory,
                        fleet_of=fleet_of,
                    )
            if not began.is_set():
                return


def listening(config: DashboardConfig, *, usual: int = DashboardConfig().port) -> socket.socket:
    """Its socket: on any free port if the usual one is taken, as by the dashboard of another run.

    Raises ConfigError for another port that is taken: somebody chose it.
    """
    try:
        return open_listener(config.host, config.port, _PORT_KEY)
    except ConfigError:
        if config.port != usual:
            raise
        return bind(config.host, 0, _PORT_KEY)


async def run_dashboard(
    role: Role,
    key: str | None,
    *,
    allow_actions: bool,
    on_ready: Callable[[int], object] = bool,
    others: Sequence[Path] = (),
    listener: socket.socket | None = None,
    stored_at: float | None = None,
    directory: Path | None = None,
    fleet_of: Config | None = None,
) -> None:
    """The dashboard inside an existing role, on this socket or a new one.

    `stored_at`: the role's broker is a copy of what the run's stored last, at that Unix time: nothing can be changed.
    """
    directory = directory or run_directory(role.config)
    config, reader = role.config.dashboard, HistoryReader(directory / HISTORY)
    monitor = Monitor(role.config, role.client, reader, directory)
    monitor.others, monitor.stored_at, monitor.has_fleet = others, stored_at, fleet_of is not None
    role.spawn(monitor.run())
    role.spawn(monitor.keep_index())
    role.spawn(_close_streams(role, monitor))

    def ready(port: int) -> None:
        url = url_of(socket_, config.host)
        role.status.fact(url=url)
        role.status.waiting(WaitKind.REQUESTS)
        get_logger().info("dashboard ready", url=url)
        on_ready(port)

    actions = (allow_actions or config.allow_actions) and stored_at is None
    app = make_app(monitor, key, allow_actions=actions, fleet_of=fleet_of)
    socket_ = listener or bind(config.host, config.port, _PORT_KEY)
    try:
        with contextlib.closing(socket_):
            await serve_on(socket_, app, stop=role.stop, grace_s=_GRACE_S, on_ready=ready)
    finally:
        monitor.save()
        reader.close()
        monitor.index.close()


async def _until_it_runs(role: Role, config: Config, began: asyncio.Event) -> None:
    """End this look at stored data once the run's own broker answers."""
    while not await asyncio.to_thread(is_running, config):
        if not await role.nap(_LOOK_S):
            return
    get_logger().info("the run's broker is back")
    began.set()
    role.stop.set()


async def _close_streams(role: Role, monitor: Monitor) -> None:
    """Streams never end by themselves, and would use up the grace time."""
    await role.stop.wait()
    monitor.close()


KEY_NAME = "SLUICE_DASHBOARD_KEY"
_ASK = {"WWW-Authenticate": 'Basic realm="Sluice dashboard", charset="UTF-8"', "Connection": "close"}
_NO_KEY = "the key is missing or wrong; give it as the password (any user name), or as 'Authorization: Bearer KEY'"
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "img-src 'self' data:"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_KEPT = (b"cache-control", b"public, max-age=31536000, immutable")
_FRESH = (b"cache-control", b"no-store")


class Gate:
    """ASGI middleware: 401 without the key."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._key is not None and not _holds(scope, self._key):
            await with_unread_body(problem_response(401, _NO_KEY, headers=_ASK))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def check_host(config: DashboardConfig, key: str | None) -> None:
    """Raises ConfigError if everybody on the network would have access."""
    if key is None and not is_loopback(config.host):
        raise ConfigError(
            f"dashboard.host is {config.host!r}, which others can reach, and no key is set; "
            f"set the environment variable {KEY_NAME}, or use dashboard.host=127.0.0.1"
        )


def _holds(scope: Scope, key: str) -> bool:
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, rest = given[0].partition(b" ")
    token = rest.strip()
    if scheme.lower() == b"basic":
        try:
            token = base64.b64decode(token, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    return hmac.compare_digest(token, key.encode())


class SafeHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_static = scope["path"].startswith("/static/") and message["status"] == 200
                more = [*_HEADERS, _KEPT if is_static else _FRESH]
                names = {name for name, _ in more}
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in names]
                message = {**message, "headers": [*kept, *more]}
            await send(message)

        await self._app(scope, receive, with_headers)
