"""The gateway's own numbers, for Prometheus; names and labels are in pipeline/telemetry/families.py."""

from __future__ import annotations

import time
from secrets import token_hex

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.pipeline.telemetry import families
from sluice.pipeline.telemetry.spans import Span
from sluice.pipeline.telemetry.tracing import Tracing
from sluice.pipeline.wire.trace import Caller, SpanRef, caller, state_of


class Metrics:
    """Uses the process's registry, so its `metrics` address and the gateway's `/metrics` serve the same page."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = to = registry or CollectorRegistry()
        self.requests = families.counter("sluice_gateway_requests_total", to)
        self.seconds = families.histogram("sluice_gateway_request_seconds", to)
        self.tokens = families.counter("sluice_gateway_tokens_total", to)
        self.in_flight = families.gauge("sluice_gateway_in_flight", to)
        self.rollouts = families.counter("sluice_gateway_rollouts_total", to)
        self.resyncs = families.counter("sluice_gateway_resyncs_total", to)

    def text(self) -> bytes:
        """The page."""
        return families.page(self.registry)


class Measured:
    """ASGI middleware: counts answers by route and status, and their seconds until the last byte.

    A caller's `traceparent` becomes the parent of the request's span, which is the parent of its jobs. Where spans are
    exported, a request without one begins a trace.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None = None, name: str = "") -> None:
        """`name`: of this process."""
        self._app, self._metrics, self._tracing, self._name = app, metrics, tracing, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        at, parent = time.time(), self._parent(scope)
        request = None if parent is None else parent.span.child("request", token_hex(8))
        held = caller.set(None if parent is None or request is None else Caller(request, parent.state))
        try:
            await self._app(scope, receive, note)
        finally:
            caller.reset(held)
            route, took_s = getattr(scope.get("route"), "path", "other"), time.monotonic() - began
            self._metrics.requests.labels(route, str(status)).inc()
            exemplar = {"trace_id": f"{request.trace_id:032x}"} if request is not None and request.sampled else None
            self._metrics.seconds.labels(route).observe(took_s, exemplar)
            if request is not None and parent is not None and self._tracing is not None:
                self._export(request, parent, f"{scope['method']} {route}", status, at, took_s)

    def _parent(self, scope: Scope) -> Caller | None:
        """What the request's span is below; None if it isn't traced."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if given := SpanRef.read(headers):
            return Caller(given, state_of(headers))
        if self._tracing is None or not self._tracing.enabled or scope["method"] != "POST":
            return None
        return Caller(SpanRef.root("request", token_hex(16), ratio=self._tracing.ratio)._replace(span_id=0))

    def _export(self, ref: SpanRef, parent: Caller, name: str, status: int, at: float, took_s: float) -> None:
        assert self._tracing is not None
        method, _, route = name.partition(" ")
        shown = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        error = f"HTTP {status}" if status >= 500 or status == 499 else ""
        self._tracing.send(
            [
                Span(
                    stage="request", ref=ref, parent=parent.span.span_id, start=at, end=at + took_s, kind="server",
                    role="gateway", process=self._name, name=name, attributes=shown, error=error,
                )
            ]
        )  # fmt: skip
