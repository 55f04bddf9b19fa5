"""`/metrics` of one process: a thread of its own, so that an engine that holds the event loop does not hide itself.

- It sleeps in the kernel between two scrapes: no polling.
- It never stops a role. Where port 0 cannot be had, the process goes on without metrics and says so; a port that
  somebody chose and that is taken is a ConfigError, before any work.
- A caller that does not speak is cut off after 10 s. Nobody is asked for a key: the numbers hold no text of anyone.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Generator
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import MetricsHandler

from pipeline.config.operate_types import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.logs import get_logger
from pipeline.telemetry.process import Telemetry

_EVERYWHERE = ("", "0.0.0.0", "::")
_JOIN_S = 1.0
_PAUSE_S = 0.2


class _Handler(MetricsHandler):
    timeout = 10

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_error(404)


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service, which may take seconds
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no file descriptor is left: asked again at once, it would fail again at once
            time.sleep(_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        get_logger().debug("a scrape was cut off", caller=str(client_address[0]))


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves a process's registry from construction on; `close` ends it."""

    def __init__(self, host: str, port: int, telemetry: Telemetry) -> None:
        """Raises OSError."""
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        kind = _Server6 if family == socket.AF_INET6 else _Server
        self._server = kind((host, port), _Handler.factory(telemetry.registry))
        self._closing = False
        self.port = int(self._server.server_address[1])
        self.address = _address(host, self.port)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        """Free the port."""
        self._closing = True
        with contextlib.suppress(OSError), socket.create_connection(self._server.server_address[:2], timeout=_JOIN_S):  # type: ignore[arg-type]
            self._thread.join(_JOIN_S)  # the connection woke it up
        self._server.server_close()


@contextlib.contextmanager
def metrics_server(config: MetricsConfig, telemetry: Telemetry) -> Generator[str | None]:
    """The address ("host:port") by which others reach `/metrics` of this process; None where it has none.

    Raises ConfigError for an address that was chosen and cannot be had.
    """
    server = _open(config, telemetry) if config.enabled else None
    try:
        yield server.address if server else None
    finally:
        if server:
            server.close()


def _open(config: MetricsConfig, telemetry: Telemetry) -> MetricsServer | None:
    try:
        return MetricsServer(config.host, config.port, telemetry)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if config.port == 0:
            get_logger().warning("no metrics of this process", host=config.host, cause=reason)
            return None
        raise ConfigError(
            f"metrics.port {config.port} on {config.host} cannot be had ({reason}): every process of this host needs "
            "one of its own; set metrics.port=0 (SLUICE_METRICS_PORT=0) for a free one, or metrics.enabled=false"
        ) from error


def _address(host: str, port: int) -> str:
    """As others write it: a name of this host where it listens on every interface."""
    name = socket.gethostname() if host in _EVERYWHERE else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
