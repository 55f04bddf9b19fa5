"""The gateway's own numbers, for Prometheus; names and labels are in pipeline/telemetry/names.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pipeline.telemetry import instruments


class Metrics:
    """In the registry of the process, so that its `metrics` address and the gateway's `/metrics` are one page."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = to = registry or CollectorRegistry()
        self.requests = instruments.counter("sluice_gateway_requests_total", to)
        self.seconds = instruments.histogram("sluice_gateway_request_seconds", to)
        self.tokens = instruments.counter("sluice_gateway_tokens_total", to)
        self.in_flight = instruments.gauge("sluice_gateway_in_flight", to)
        self.rollouts = instruments.counter("sluice_gateway_rollouts_total", to)
        self.resyncs = instruments.counter("sluice_gateway_resyncs_total", to)

    def text(self) -> bytes:
        """The page."""
        return instruments.page(self.registry)
