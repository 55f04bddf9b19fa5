"""A collector of OTLP over gRPC on loopback: opentelemetry-proto's own servicer, which keeps what arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Arrived(NamedTuple):
    """One span as it was sent."""

    name: str
    span_id: str
    parent: str
    trace_id: str
    start: int  # Unix ns
    end: int
    service: str
    process: str
    kind: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]  # trace id, span id
    error: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Arrived] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            about = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_arrived(span, about) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Arrived]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Arrived:
        [found] = self.named(name)
        return found


def _arrived(span: Any, about: dict[str, Any]) -> Arrived:
    return Arrived(
        name=span.name,
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        trace_id=span.trace_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        service=about["service.name"],
        process=about.get("service.instance.id", ""),
        kind=span.kind,
        attributes=_values(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        error=span.status.message,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Its endpoint, and what arrived."""
    server, kept = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", kept
    finally:
        server.stop(grace=None).wait()
