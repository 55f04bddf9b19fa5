"""prometheus_client's objects made from the table of names, and a registry as the page that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pipeline.telemetry.names import FAMILIES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Each counter would come with a second series, `_created`, that no table names and nobody asks for.
disable_created_metrics()


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Raises KeyError for a name that is not in the table."""
    family = FAMILIES[name]
    return Counter(name, family.doc, family.labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Raises KeyError for a name that is not in the table."""
    family = FAMILIES[name]
    return Gauge(name, family.doc, family.labels, registry=registry)


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    """Raises KeyError for a name that is not in the table."""
    family = FAMILIES[name]
    return Histogram(name, family.doc, family.labels, buckets=family.buckets, registry=registry)


def read(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A counter or gauge read at scrape time; values by their labels, in the table's order."""
    family = FAMILIES[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = kind(name, family.doc, labels=family.labels)
    for labels, value in values:
        made.add_metric(labels, value)
    return made


def page(registry: CollectorRegistry) -> bytes:
    """The text format."""
    return generate_latest(registry)
