"""One process's spans on their way to a collector, by OTLP; nothing else imports OpenTelemetry.

    send ──▶ queue (tracing.max_queue) ──a thread──▶ OpenTelemetry's exporter ──gRPC──▶ the collector

- `send` never waits: a full queue drops the newest spans, and a collector that is away drops those it was to get. Both
  are counted (`sluice_dropped_spans_total`), and said once until a batch arrives again.
- The thread alone turns records into OTLP's messages, so a process that serves pays for a list append.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, get_args

from sluice import __version__
from sluice.pipeline.config.types import TracingConfig
from sluice.pipeline.errors import ConfigError, how_to_install
from sluice.pipeline.logs import get_logger
from sluice.pipeline.telemetry.spans import Kind, Span

_BATCH = 512
_EVERY_S = 1.0
_CLOSE_S = 3.0


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
        self._encode = Encoder(run) if config.enabled else None

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
        assert self._encode is not None
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            done = self._exporter.export(self._encode(batch)) is SpanExportResult.SUCCESS
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
    """Takes ready requests for the collector: OpenTelemetry's exporter without its encoder."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"tracing.enabled needs OpenTelemetry: {how_to_install('otel')}, or set tracing.enabled: false ({error})"
        ) from error
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we say it once, and count

    class Exporter(OTLPSpanExporter):
        def _translate_data(self, data: Any) -> Any:  # once for each try
            return data

        def _count_data(self, data: Any) -> int:
            return sum(len(scope.spans) for resource in data.resource_spans for scope in resource.scope_spans)

    # An address without TLS says so by http://; headers, certificates and compression come from OTEL_EXPORTER_OTLP_*.
    return Exporter(endpoint=config.endpoint, timeout=config.timeout_s)


class Encoder:
    """A request for a collector, of spans: the same as OpenTelemetry's encoder makes of its own spans, which cost more
    than all the rest of a span."""

    def __init__(self, run: str) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.trace.v1 import trace_pb2

        self._run, self._request = run, ExportTraceServiceRequest
        self._kinds = {kind: trace_pb2.Span.SpanKind.Value(f"SPAN_KIND_{kind.upper()}") for kind in get_args(Kind)}
        self._error = trace_pb2.Status.STATUS_CODE_ERROR
        known, remote = (
            trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK, trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
        )  # fmt: skip
        self._first, self._remote = known, known | remote

    def __call__(self, spans: Iterable[Span]) -> Any:
        request = self._request()
        of: dict[tuple[str, str], Any] = {}
        for span in spans:
            who = (span.role, span.process)
            into = of.get(who)
            if into is None:
                into = of[who] = self._resource(request, *who)
            self._add(into, span)
        return request

    def _resource(self, request: Any, role: str, process: str) -> Any:
        made = request.resource_spans.add()
        named = {"service.name": f"sluice-{role}", "service.namespace": "sluice", "sluice.run": self._run}
        if process:
            named["service.instance.id"] = process
        for key, value in named.items():
            _put(made.resource.attributes.add(key=key).value, value)
        scope = made.scope_spans.add()
        scope.scope.name, scope.scope.version = "sluice", __version__
        return scope.spans

    def _add(self, into: Any, span: Span) -> None:
        made = into.add(
            trace_id=span.ref.trace_id.to_bytes(16, "big"),
            span_id=span.ref.span_id.to_bytes(8, "big"),
            name=span.name or span.stage,
            kind=self._kinds[span.kind],
            start_time_unix_nano=int(span.start * 1e9),
            end_time_unix_nano=int(span.end * 1e9),
            flags=self._remote if span.parent else self._first,
        )
        if span.parent:
            made.parent_span_id = span.parent.to_bytes(8, "big")
        if span.error:
            made.status.code, made.status.message = self._error, span.error
        if span.attributes:
            add = made.attributes.add
            for key, value in span.attributes.items():
                _put(add(key=key).value, value)
        if span.links:
            link = made.links.add
            for ref in span.links:
                link(
                    trace_id=ref.trace_id.to_bytes(16, "big"), span_id=ref.span_id.to_bytes(8, "big"),
                    flags=self._remote,
                )  # fmt: skip


def _put(into: Any, value: Any) -> None:
    try:
        match value:
            case str():
                into.string_value = value
            case bool():
                into.bool_value = value
            case int():
                into.int_value = value
            case float():
                into.double_value = value
            case _:
                into.array_value.SetInParent()
                for one in value:
                    _put(into.array_value.values.add(), one)
    except (TypeError, ValueError):  # an integer of more than 64 bits, text that is no Unicode: shown, not lost
        into.string_value = ascii(value)
