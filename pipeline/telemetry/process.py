"""What one process tells Prometheus.

- Nothing is paid between scrapes but a histogram's observation per sequence, batch or step: the rest is read from the
  heartbeat's row at the scrape.
- A counter is there from the start; a gauge once the process has said it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pipeline import __version__
from pipeline.status.heartbeat import Heartbeat
from pipeline.telemetry.instruments import histogram, read
from pipeline.telemetry.names import of_role


class Telemetry:
    """One process's registry; further collectors of the same process are registered with it."""

    def __init__(self, role: str, row: Heartbeat | None = None) -> None:
        self.role, self.registry = role, CollectorRegistry()
        ProcessCollector(namespace="sluice", registry=self.registry)
        self.registry.register(_RoleCollector(role, row))
        self._histograms = {
            family.name: histogram(family.name, self.registry).labels(role)
            for family in of_role(role)
            if family.kind == "histogram"
        }

    def observe(self, **values: float) -> None:
        """Values of histograms of this role; raises KeyError for a name that it does not have."""
        for name, value in values.items():
            self._histograms[name].observe(value)


class _RoleCollector(Collector):
    """The heartbeat's row, read when it is asked for; from another thread than the one that writes it."""

    def __init__(self, role: str, row: Heartbeat | None) -> None:
        self._role, self._row = role, row
        self._facts = [family for family in of_role(role) if family.fact is not None]

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry would collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of this role."""
        yield read("sluice_role_info", [((self._role, __version__), 1.0)])
        row = self._row
        if row is None:
            return
        since = row.waiting_since
        yield read("sluice_waiting_seconds", [((self._role,), 0.0 if since is None else max(0.0, time.time() - since))])
        facts = dict(row.facts)
        for family in self._facts:
            value = facts.get(family.fact or "", 0 if family.kind == "counter" else None)
            yield read(family.name, [] if value is None else [((self._role,), float(value))])
