"""An ASGI application served in the running event loop, and the deadlines and bounds of its connections.

    silent ─first byte─▶ head ─▶ body ─▶ answer ─▶ silent …
    HEAD_S     HEAD_S      BODY_SILENT_S, BODY_S   WRITE_S   uvicorn's keep-alive

- Signals belong to the role: `stop` is the only way to end the server. It then accepts no new connections, gives
  running requests `grace_s`, and cancels the rest. Once `serve` has returned or was cancelled, none of its requests
  is still running.
- `Connection` is uvicorn's, on httptools, plus what it lacks. httptools refuses what two servers may parse differently
  (a length beside chunks, a bare line feed). An HTTP/1.1 request must name exactly one host; trailers are dropped,
  because the headers have been checked by then.
- A caller is never cut off for a delay of ours: a body the application doesn't read, an answer being made.
- At the connection limit, the connection that has gone longest without a request is closed. A few more are accepted
  beyond it, only for health and metrics requests (ALWAYS).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
from collections.abc import Callable, Generator
from functools import cache, partial
from http import HTTPStatus
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sluice.pipeline.child_process import LISTENER
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, SluiceError

HEAD_S = 15.0  # from the first byte, or the connection, to the end of the headers
BODY_SILENT_S, BODY_S = 20.0, 300.0  # without a byte; in total
WRITE_S = 60.0  # for a caller that isn't reading
MAX_HEAD_BYTES = 65_536  # request line and headers
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20  # what a refused caller may still send, so it can read the refusal
_MOST, _LEAST = 2_048, 64  # connections
ALWAYS = (b"/health", b"/metrics")  # answered even at the limit
RESERVED = 16  # connections for them, beyond the limit
_FULL = (503, "too many connections; try again later")


@cache
def max_connections() -> int:
    """Half of the files this process may open, within bounds. Raises the soft limit as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 2 * _MOST:
        soft = 2 * _MOST if hard < 0 else min(2 * _MOST, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _MOST if soft < 0 else min(_MOST, max(_LEAST, soft // 2))


class Connection(HttpToolsProtocol):
    """uvicorn makes one per caller. Subclasses may change the times."""

    head_s, body_silent_s, body_s, write_s = HEAD_S, BODY_SILENT_S, BODY_S, WRITE_S
    max_head_bytes = MAX_HEAD_BYTES
    max_connections = 0  # as many as this process allows

    _in_body = _in_head = _refused = _is_reserved = False
    _head_bytes = _thrown_away = 0
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _since = _body_began = _heard = 0.0
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if self._is_full():
            self._make_room()
        self._is_reserved = self._is_full()
        if self._is_reserved and self._count(reserved=True) > RESERVED:
            self._refuse(*_FULL)
        else:
            self._arm(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._refused:
            self._thrown_away += len(data)
            if self._thrown_away > _LINGER_BYTES:
                self.transport.abort()
            return
        self._heard = self.loop.time()
        if self._timer is None and not self._in_body:
            self._arm(self.head_s)
        super().data_received(data)
        if self._in_head and not self._refused:  # also counts what httptools hasn't reported yet
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:  # a request that follows in the same bytes
            self._arm(self.head_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._body_began = self._heard
        self._arm(self.body_silent_s)
        if self._refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        version = self.parser.get_http_version()  # type: ignore[union-attr]
        hosts = sum(name == b"host" for name, _ in self.headers)
        if size > self.max_head_bytes:
            self._refuse_head()
        elif hosts != 1 and (hosts or version == "1.1"):
            self._refuse(400, "send exactly one Host header")
        elif self.parser.should_upgrade() and self._has_body():  # type: ignore[union-attr]
            # httptools would skip the body and read it as the next request.
            self._refuse(400, "an Upgrade with a body is ambiguous; send the request without Upgrade")
        elif self._is_reserved and self._is_full() and not self._asks_how_it_is():
            self._refuse(*_FULL)
        else:
            if not self._asks_how_it_is():
                self._is_reserved = (
                    False  # it was let in because there's room: a reserved place isn't held for its life
                )
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._since = False, self._heard
        self._disarm()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if self.transport.is_closing():
            self._arm_write()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not HTTP, or ambiguous")

    def _is_full(self) -> bool:
        """Whether all unreserved connections are in use."""
        most = self.max_connections or max_connections()
        return len(self.connections) > most and self._count(reserved=False) - (not self._is_reserved) >= most

    def _count(self, *, reserved: bool) -> int:
        """Doesn't count refused connections: they only read their refusal."""
        ours = (one for one in self.connections if isinstance(one, Connection))
        return sum(one._is_reserved is reserved and not one._refused for one in ours)

    def _asks_how_it_is(self) -> bool:
        is_get = self.parser.get_method() == b"GET"  # type: ignore[union-attr]
        return is_get and self.url.partition(b"?")[0] in ALWAYS and not self._has_body()

    def _make_room(self) -> None:
        idle = [one for one in self.connections if isinstance(one, Connection) and one is not self and one._is_idle()]
        if oldest := min(idle, key=lambda one: one._since, default=None):
            oldest._refused = True
            oldest.transport.abort()

    def _is_idle(self) -> bool:
        """It has no complete request, and no answer in progress."""
        is_quiet = not self._in_body and not self._answers()
        return is_quiet and not self._refused and not self.transport.get_write_buffer_size()

    def _has_body(self) -> bool:
        given = dict(self.headers)
        return b"transfer-encoding" in given or bool(given.get(b"content-length", b"").strip(b" 0"))

    def _answers(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm_write(self) -> None:
        if self._write_timer is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.write_s, self._write_late)

    def _write_late(self) -> None:
        """A caller that has read something since is slow, not silent."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() < self._unsent:
            self._arm_write()
        else:
            self.transport.abort()

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_body:
            now = self.loop.time()
            left = min(self._heard + self.body_silent_s, self._body_began + self.body_s) - now
            if self.flow.read_paused:
                self._heard = self._body_began = now  # reading it is our job
                self._arm(self.body_silent_s)
            elif left > 0:
                self._arm(left)
            else:
                self._refuse(408, "the body was not complete in time")
        elif self._answers():
            self._arm(self.head_s)  # part of the next request, before the answer to this one
        elif self._in_head:
            self._refuse(408, f"the headers were not complete within {self.head_s:g} s")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"request line and headers have more than {self.max_head_bytes} bytes; send less")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; an answer that has already begun is cut off."""
        self._refused = True
        self._disarm()
        if self._answers():
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._write_timer = self._write_timer or self.loop.call_later(_LINGER_S, self.transport.abort)


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
    key: str = "",
) -> None:
    """Serve until `stop`. Port 0 takes a free one; `on_ready` is called with the port once requests are accepted.
    `key` is the configuration's for the port, which an error names.

    Raises ConfigError if the port is taken or not permitted, SluiceError if the application doesn't start, and
    DeadlineExceeded if a cancelled request doesn't end.
    """
    with contextlib.closing(bind(host, port, key)) as listener:
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
    """The same on a listening socket. Without `ticks`, an idle server sleeps and its answers have no date."""
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
    """uvicorn without its signal handlers and exits; its end leaves nothing running."""

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
        """Requests get `grace_s`, the rest are cancelled and awaited; only then does the application end."""
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
        """Whether every request ended and its answer was sent; callers that don't read it are cut off."""
        until = asyncio.get_running_loop().time() + deadline_s
        while self.server_state.tasks or self.server_state.connections:
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(0.01)
        if not self.server_state.tasks:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        return not self.server_state.tasks


def open_listener(host: str, port: int, key: str = "") -> socket.socket:
    """The supervisor's socket if there is one, else a new one. Raises ConfigError, which names the key."""
    number = os.environ.pop(LISTENER, "")
    if not number:
        return bind(host, port, key)
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def bind_near(host: str, port: int) -> socket.socket | None:
    """A listening socket on this port or, if it's taken, on any free one; None if the host isn't this machine's."""
    for wanted in (port, 0):
        with contextlib.suppress(ConfigError):
            return bind(host, wanted)
    return None


def url_of(listener: socket.socket, host: str) -> str:
    """The address that reaches it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def bind(host: str, port: int, key: str = "") -> socket.socket:
    """A listening socket. Raises ConfigError, which names the configuration's key for the port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sets it only on sockets it created itself; without it, a body sent after its
        # headers waits about 40 ms for the caller's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            other = f"set another {key}" if key else "choose another port"
            raise ConfigError(f"port {port} is in use; stop what listens there, or {other}") from error
        reason = getattr(error, "strerror", None) or str(error)
        other = f"set another {key} or its host" if key else "choose another host or port"
        raise ConfigError(f"cannot listen on {host}, port {port} ({reason}); {other}") from error
