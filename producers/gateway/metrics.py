"""The gateway's own numbers, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One registry a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_gateway_requests", "Requests answered", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "sluice_gateway_request_seconds",
            "Until the end of the answer",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter("sluice_gateway_tokens", "Tokens answered", ["kind"], registry=self.registry)
        self.in_flight = Gauge("sluice_gateway_in_flight", "Requests in hand", registry=self.registry)
        self.rollouts = Counter(
            "sluice_gateway_rollouts", "Rollouts opened, published, dropped, forked", ["event"], registry=self.registry
        )
        self.resyncs = Counter(
            "sluice_gateway_resyncs", "Turns whose sampled text renders differently", registry=self.registry
        )

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
