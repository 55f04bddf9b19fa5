"""One process's metrics for Prometheus, and the `/metrics` server.

- The server has its own thread, so an engine that blocks the event loop still shows up. It sleeps in the kernel between
  two scrapes: no polling.
- Between scrapes the only cost is one histogram observation per sequence, batch or step: the rest is read from the
  heartbeat's row at the scrape. A counter exists from the start; a gauge once the process has reported it.
- It never stops a role. If port 0 isn't available, the process continues without metrics and logs that; a configured
  port that is taken is a ConfigError, before any work.
- Silent, slow or too many clients are handled as on all our servers (pipeline/http/server.py). No key is required: the
  numbers contain nobody's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import cast

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice import __version__
from sluice.pipeline.config.types import MetricsConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.http.server import serve_on
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.heartbeat import Heartbeat
from sluice.pipeline.telemetry.families import histogram, of_role, read
from sluice.pipeline.thread_pool import lost_threads
from sluice.pipeline.wire.trace import SpanRef

_OF_PROCESS = "sluice_process_"
_EVERYWHERE = ("", "0.0.0.0", "::")
_JOIN_S = 1.0
_GRACE_S = 0.2
_NOT_HERE = b"this server has /metrics"


class MetricsServer:
    """Serves a process's registry from construction on; `close` ends it."""

    def __init__(self, host: str, port: int, telemetry: Telemetry | RunsTelemetry) -> None:
        """Raises OSError."""
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.create_server(address[:2], family=family)  # type: ignore[arg-type]
        self.port = int(self._listener.getsockname()[1])
        self.address = _address(host, self.port)
        self._app = _metrics_app(telemetry)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve_on(self._listener, self._app, stop=self._stop, grace_s=_GRACE_S, ticks=False))

    def close(self) -> None:
        """Free the port."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_JOIN_S)
        self._listener.close()


def _metrics_app(telemetry: Telemetry | RunsTelemetry) -> ASGIApp:
    def page(registry: CollectorRegistry) -> ASGIApp:
        return cast(ASGIApp, prometheus_client.make_asgi_app(registry))  # pyright: ignore[reportUnknownMemberType]

    metrics, runs = page(telemetry.registry), telemetry.runs if isinstance(telemetry, RunsTelemetry) else {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no lifespan
        if scope["path"] == "/metrics":
            await metrics(scope, receive, send)
            return
        if (run := runs.get(scope["path"].removeprefix("/metrics/"))) is not None:
            await page(run.registry)({**scope, "path": "/metrics"}, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": _NOT_HERE})

    return app


@contextlib.contextmanager
def metrics_server(config: MetricsConfig, telemetry: Telemetry | RunsTelemetry) -> Generator[str | None]:
    """The address ("host:port") where others reach this process's `/metrics`; None if it has none.

    Raises ConfigError for a configured address that isn't available.
    """
    server = _open(config, telemetry) if config.enabled else None
    try:
        yield server.address if server else None
    finally:
        if server:
            server.close()


def _open(config: MetricsConfig, telemetry: Telemetry | RunsTelemetry) -> MetricsServer | None:
    try:
        return MetricsServer(config.host, config.port, telemetry)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if config.port == 0:
            get_logger().warning("no metrics of this process", host=config.host, cause=reason)
            return None
        raise ConfigError(
            f"metrics.port {config.port} on {config.host} is not available ({reason}): each process on this host needs "
            "its own; set metrics.port=0 (SLUICE_METRICS_PORT=0) for a free one, or metrics.enabled=false"
        ) from error


def _address(host: str, port: int) -> str:
    """As seen by others: this host's name if it listens on every interface."""
    name = socket.gethostname() if host in _EVERYWHERE else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


class Telemetry:
    """One process's registry; other collectors of the process register with it."""

    def __init__(self, role: str, row: Heartbeat | None = None) -> None:
        self.role, self.registry = role, CollectorRegistry()
        ProcessCollector(namespace="sluice", registry=self.registry)
        self.registry.register(_RoleCollector(role, row))
        self._histograms = {
            family.name: histogram(family.name, self.registry).labels(role)
            for family in of_role(role)
            if family.kind == "histogram"
        }

    def observe(self, trace: Mapping[str, str] = {}, /, **values: float) -> None:
        """Record histogram values of this role; raises KeyError for an unknown name.

        `trace`: of a message. The bucket then names its trace as an exemplar, in the OpenMetrics format alone.
        """
        ref = SpanRef.read(trace) if trace else None
        exemplar = (
            {"trace_id": f"{ref.trace_id:032x}", "span_id": f"{ref.span_id:016x}"} if ref and ref.sampled else None
        )
        for name, value in values.items():
            self._histograms[name].observe(value, exemplar)


class RunsTelemetry:
    """Those of the runs that one process serves: every series has the label `run`, the process's own once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.runs: dict[str, Telemetry] = {}
        ProcessCollector(namespace="sluice", registry=self.registry)
        self.registry.register(_RunsCollector(self.runs))


class _RunsCollector(Collector):
    def __init__(self, runs: Mapping[str, Telemetry]) -> None:
        self._runs = runs

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise a registry would collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of all runs."""
        found: dict[str, Metric] = {}
        for run, telemetry in list(self._runs.items()):
            for metric in telemetry.registry.collect():
                if metric.name.startswith(_OF_PROCESS):
                    continue
                family = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [sample._replace(labels={"run": run, **sample.labels}) for sample in metric.samples]
        yield from found.values()


class _RoleCollector(Collector):
    """Reads the heartbeat's row at scrape time, from another thread than the one that writes it."""

    def __init__(self, role: str, row: Heartbeat | None) -> None:
        self._role, self._row = role, row
        self._facts = [family for family in of_role(role) if family.fact is not None]

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise a registry would collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of this role."""
        yield read("sluice_role_info", [((self._role, __version__), 1.0)])
        yield read("sluice_lost_threads", [((self._role,), float(lost_threads()))])
        row = self._row
        facts = {} if row is None else dict(row.facts)
        if row is not None:
            since = row.wait and row.wait.since
            waited_s = 0.0 if since is None else max(0.0, time.time() - since)
            yield read("sluice_waiting_seconds", [((self._role,), waited_s)])
        for family in self._facts:
            value = facts.get(family.fact or "", 0 if family.kind == "counter" else None)
            yield read(family.name, [] if value is None else [((self._role,), float(value))])
