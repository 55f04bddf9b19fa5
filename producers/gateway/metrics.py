"""The gateway's own numbers, for Prometheus; names and labels are in pipeline/telemetry/families.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pipeline.telemetry import families


class Metrics:
    """In the registry of the process, so that its `metrics` address and the gateway's `/metrics` are one page."""

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
