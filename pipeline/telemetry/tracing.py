"""One process's spans on their way to a collector, by OTLP; nothing else imports OpenTelemetry.

    send ──▶ queue (tracing.max_queue) ──a thread──▶ OpenTelemetry's exporter ──gRPC──▶ the collector

- `send` never waits: a full queue drops the newest spans, and a collector that is away drops those it was to get. Both
  are counted (`sluice_dropped_spans_total`), and said once until a batch arrives again.
- The thread alone turns records into OpenTelemetry's spans, so a process that serves pays for a list append.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from sluice import __version__
from sluice.pipeline.config.types import TracingConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.telemetry.spans import Span
from sluice.pipeline.wire.trace import SpanRef

_BATCH = 512
_EVERY_S = 1.0
_CLOSE_S = 3.0
_NO_PACKAGE = (
    "tracing.enabled needs OpenTelemetry: pip install 'sluice[otel]' (opentelemetry-sdk and "
    "opentelemetry-exporter-otlp-proto-grpc), or set tracing.enabled: false"
)


def _untold(**_counts: int) -> None:
    """Nobody listens."""


class Tracing:
    """Off unless `tracing.enabled`; close it."""

    def __init__(self, config: TracingConfig, run: str, *, fact: Callable[..., None] | None = None) -> None:
        """`fact` is told the counts. Raises ConfigError if the package is missing or the endpoint is no URL."""
        self.enabled, self.ratio, self._run = config.enabled, config.sample_ratio, run
        self.sent = self.dropped = 0
        self._fact, self._config = fact or _untold, config
        self._queue: deque[Span] = deque()
        self._thread: threading.Thread | None = None
        self._due, self._closing, self._warned = threading.Event(), False, False
        self._exporter = _exporter(config) if config.enabled else None
        self._make = _Maker(run) if config.enabled else None

    def send(self, spans: Iterable[Span]) -> None:
        """Those of traces that are sampled; returns at once."""
        if not self.enabled or self._closing:
            return
        for span in spans:
            if not span.ref.sampled:
                continue
            if len(self._queue) >= self._config.max_queue:
                self._drop(1, f"the queue is full (tracing.max_queue {self._config.max_queue})")
            else:
                self._queue.append(span)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="tracing", daemon=True)
            self._thread.start()
        if len(self._queue) >= _BATCH:
            self._due.set()

    def close(self) -> None:
        """Send what is queued, for at most a few seconds; the rest counts as dropped."""
        self._closing = True
        self._due.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        if self._exporter is not None:
            self._exporter.shutdown(timeout_millis=0)  # ends a retry that waits
        if self._thread is not None:
            self._thread.join(1.0)
            if left := len(self._queue):
                self._drop(left, "the process ends")

    def _run_thread(self) -> None:
        while not (self._closing and not self._queue):
            if not self._closing and len(self._queue) < _BATCH:
                self._due.wait(_EVERY_S)
                self._due.clear()
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            if batch and not self._export(batch) and self._closing:
                break

    def _export(self, batch: list[Span]) -> bool:
        assert self._exporter is not None
        assert self._make is not None
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            done = self._exporter.export([self._make(span) for span in batch]) is SpanExportResult.SUCCESS
            why = f"{self._config.endpoint} takes none"
        except Exception as error:  # of gRPC or of an attribute: spans may be lost, and nothing else
            done, why = False, f"{error!r}"
        if not done:
            self._drop(len(batch), why)
            return False
        self.sent += len(batch)
        self._warned = False
        self._fact(spans_sent=self.sent)
        return True

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        self._fact(spans_dropped=self.dropped)
        if not self._warned:
            self._warned = True
            get_logger().warning("spans are dropped; everything else continues", cause=why, dropped=self.dropped)


def _exporter(config: TracingConfig) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"{_NO_PACKAGE} ({error})") from error
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we say it once, and count
    # An address without TLS says so by http://; headers, certificates and compression come from OTEL_EXPORTER_OTLP_*.
    return OTLPSpanExporter(endpoint=config.endpoint, timeout=config.timeout_s)


class _Maker:
    """OpenTelemetry's spans of ours."""

    def __init__(self, run: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        class HashedOnce(Resource):
            """The exporter asks each span's resource for its hash, which is that of a JSON text."""

            def __init__(self, attributes: dict[str, str]) -> None:
                super().__init__(attributes)
                self._hash = super().__hash__()

            def __hash__(self) -> int:
                return self._hash

        self._run, self._resources = run, dict[tuple[str, str], Any]()
        self._resource, self._span, self._link = HashedOnce, ReadableSpan, Link
        self._context, self._flags = SpanContext, TraceFlags(TraceFlags.SAMPLED)
        self._kinds = {kind.name.lower(): kind for kind in SpanKind}
        self._status, self._error = Status, StatusCode.ERROR
        self._unset: Any = None  # the same on the wire as Status(UNSET), which would be made anew for every span
        self._scope = InstrumentationScope("sluice", __version__)

    def __call__(self, span: Span) -> Any:
        parent = SpanRef(span.ref.trace_id, span.parent) if span.parent else None
        return self._span(
            name=span.name or span.stage,
            context=self._of(span.ref, is_remote=False),
            parent=None if parent is None else self._of(parent, is_remote=True),
            resource=self._resource_of(span.role, span.process),
            attributes=span.attributes,
            links=[self._link(self._of(ref, is_remote=True)) for ref in span.links],
            kind=self._kinds[span.kind],
            status=self._status(self._error, span.error) if span.error else self._unset,
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=self._scope,
        )

    def _of(self, ref: SpanRef, *, is_remote: bool) -> Any:
        return self._context(ref.trace_id, ref.span_id, is_remote, self._flags)

    def _resource_of(self, role: str, process: str) -> Any:
        known = self._resources.get((role, process))
        if known is None:
            if len(self._resources) > 10_000:  # workers come and go
                self._resources.clear()
            named = {"service.name": f"sluice-{role}", "service.namespace": "sluice", "sluice.run": self._run}
            if process:
                named["service.instance.id"] = process
            known = self._resources[role, process] = self._resource(named)
        return known
