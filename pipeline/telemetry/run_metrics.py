"""A run's metrics from a snapshot, and where its processes serve theirs. Served by the dashboard.

- Pure: numbers from the newest snapshot. Metrics that need an inspection are left out of other snapshots.
- A stall that has ended is 0, not absent, so that alerts end immediately. A wait that ends by itself is no stall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sluice.pipeline.roles import PARTICIPANTS
from sluice.pipeline.status.snapshot import Process, Snapshot, StallKind
from sluice.pipeline.telemetry.families import JOB_STATES, PROCESS_STATES, SEQUENCE_STATES, page, read


def run_page(now: Snapshot) -> bytes:
    """The run's page in the text format (families.CONTENT_TYPE)."""
    registry = CollectorRegistry()
    registry.register(_Run(now))
    return page(registry)


def run_metrics(now: Snapshot) -> Iterator[Metric]:
    """Every family of the run."""
    yield read("sluice_run_info", [((now.run, now.state), 1.0)])
    yield read("sluice_run_sequences_total", [((state,), float(getattr(now, state))) for state in SEQUENCE_STATES])
    for name, value in _single(now).items():
        yield read(f"sluice_run_{name}", [] if value is None else [((), float(value))])
    yield from _queue(now)
    yield read("sluice_run_processes", _processes(now.processes))
    present = {stall.kind for stall in now.stalls if stall.blocks}
    yield read("sluice_run_stalls", [((kind,), float(kind in present)) for kind in get_args(StallKind)])
    shown = {**now.metrics, **now.evaluation.values}
    yield read("sluice_train_metric", [((key,), value) for key, value in sorted(shown.items())])


def targets(now: Snapshot) -> list[dict[str, Any]]:
    """Prometheus' HTTP service discovery: one group per live process; its `instance` is the process's name.

    No `role` label: every metric of a process has it already, and Prometheus would rename that. A worker of several
    runs serves this one's metrics at a path of their own.
    """
    found: list[dict[str, Any]] = []
    for row in now.processes:
        if row.is_alive and (served := row.facts.get("metrics")):
            address, slash, path = served.partition("/")
            own = {"__metrics_path__": slash + path} if path else {}
            found.append({"targets": [address], "labels": {"run": now.run, "instance": row.name, **own}})
    return found


def _single(now: Snapshot) -> dict[str, float | None]:
    credit, broker = now.credit, now.broker
    return {
        "looked_at_seconds": now.at,
        "expected_sequences": now.total,
        "tokens_total": now.tokens,
        "redelivered_jobs_total": now.redelivered_jobs,
        "malformed_rows_total": now.malformed_rows,
        "queued_jobs": now.queued_jobs,
        "open_rollouts": now.open_rollouts,
        "credit_used_sequences": credit.sequences,
        "credit_limit_sequences": credit.max_sequences,
        "credit_used_bytes": credit.bytes,
        "credit_limit_bytes": credit.max_bytes,
        "weight_version": now.latest_version,
        "version_lag": now.version_lag,
        "dead_letters": now.dead_letters,
        "broker_used_bytes": broker and broker.used_bytes,
        "broker_limit_bytes": broker and broker.max_bytes,
        "broker_refused_writes_total": broker and broker.refused,
    }


def _queue(now: Snapshot) -> Iterator[Metric]:
    depth = now.depth
    jobs = [] if depth is None else [((state,), float(getattr(depth, state))) for state in JOB_STATES]
    yield read("sluice_run_jobs", jobs)
    oldest = None if depth is None else depth.oldest_s
    yield read("sluice_run_job_oldest_seconds", [] if oldest is None else [((), oldest)])
    yield read("sluice_run_stream_entries", [((lag.stream,), float(lag.entries)) for lag in now.lag])
    unread = [((lag.stream,), float(lag.entries - lag.taken)) for lag in now.lag]
    yield read("sluice_run_stream_unread_entries", unread)
    yield read("sluice_run_stream_oldest_seconds", [((lag.stream,), lag.oldest_s or 0.0) for lag in now.lag])


def _processes(rows: Iterable[Process]) -> list[tuple[tuple[str, ...], float]]:
    found = Counter((row.role, _state(row)) for row in rows)
    known = dict.fromkeys([*PARTICIPANTS, *(role for role, _ in found)])
    return [((role, state), float(found[role, state])) for role in known for state in PROCESS_STATES]


def _state(row: Process) -> str:
    return "failed" if row.ended_at is not None else "alive" if row.is_alive else "dead"


class _Run(Collector):
    def __init__(self, now: Snapshot) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        return run_metrics(self._now)

    def describe(self) -> list[Metric]:
        return []
