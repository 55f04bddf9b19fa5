"""An ASGI application served in the running event loop.

- Signals stay with the role: `stop` is the only way to end it.
- On `stop` no new connection is taken, requests in hand have `grace_s`, and what still runs then is cancelled.
- When `serve` has returned, or was cancelled, no request of it runs any more.
- Deadlines and bounds of its connections: connection.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn

from pipeline.errors import ConfigError, DeadlineExceeded, SluiceError
from pipeline.http.asgi import ASGIApp
from pipeline.http.connection import Connection

KEEP_ALIVE_S = 75
_BACKLOG = 2048
_TICK_S = 1.0  # the Date header of answers
_CANCEL_S = 10.0  # how long cancelled requests may take to end


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    grace_s: float,
    on_ready: Callable[[int], object] | None = None,
    connection: type[Connection] = Connection,
) -> None:
    """Serve until `stop`. Port 0 takes a free one; `on_ready` is called with the port once requests are taken.

    Raises ConfigError where the port cannot be had, SluiceError where the application does not start, and
    DeadlineExceeded where a cancelled request does not end.
    """
    with contextlib.closing(_bind(host, port)) as listener:
        await serve_on(listener, app, stop=stop, grace_s=grace_s, on_ready=on_ready, connection=connection)


async def serve_on(
    listener: socket.socket,
    app: ASGIApp,
    *,
    stop: asyncio.Event,
    grace_s: float,
    on_ready: Callable[[int], object] | None = None,
    ticks: bool = True,
    connection: type[Connection] = Connection,
) -> None:
    """The same on a socket that listens. Without `ticks` an idle server sleeps, and its answers have no date."""
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        date_header=ticks,
    )
    server = _Server(config, stop, grace_s)
    try:
        await server.open(listener, on_ready)
    finally:
        await server.end(0.0)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and exits, and with an end that leaves nothing running."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event, grace_s: float) -> None:
        super().__init__(config)
        self._stop, self._grace_s = stop, grace_s
        self._ready: Callable[[], object] = bool

    async def open(self, listener: socket.socket, on_ready: Callable[[int], object] | None) -> None:
        """Serve until `stop`."""
        port = listener.getsockname()[1]
        self._ready = partial(on_ready, port) if on_ready else bool
        try:
            await self.serve(sockets=[listener])
        except SystemExit as error:
            raise SluiceError(f"the server on port {port} did not start; its error is in the log") from error

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def main_loop(self) -> None:
        while not self._stop.is_set() and not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S if self.config.date_header else None):
                    await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.end(self._grace_s)

    async def end(self, grace_s: float) -> None:
        """Requests have `grace_s`, what is left is cancelled and awaited; only then the application ends."""
        if not self.started:
            return
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._quiet(grace_s)
        for task in self.server_state.tasks:
            task.cancel()
        if not await self._quiet(_CANCEL_S):
            raise DeadlineExceeded(f"cancelled requests did not end within {_CANCEL_S:g} s; a handler ignores it")
        async with asyncio.timeout(_CANCEL_S):
            await self.lifespan.shutdown()
        self.started = False

    async def _quiet(self, deadline_s: float) -> bool:
        """Whether every request ended and its answer was sent; callers that do not read it are cut off."""
        until = asyncio.get_running_loop().time() + deadline_s
        while self.server_state.tasks or self.server_state.connections:
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(0.01)
        if not self.server_state.tasks:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        return not self.server_state.tasks


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sets it on sockets of another making only, and without it a body that follows
        # its headers waits some 40 ms for the caller's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is in use; stop what listens there, or choose another port") from error
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}, port {port} ({reason}); choose another host or port") from error
