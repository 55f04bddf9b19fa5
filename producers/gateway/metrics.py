"""The gateway's own numbers, for Prometheus; names and labels are in pipeline/telemetry/families.py."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.pipeline.telemetry import families


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
    """ASGI middleware: counts answers by route and status, and their seconds until the last byte."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

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

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - began)
