"""The frozen table of every metric that Prometheus can read from Sluice, and the objects made from it.

- A rename or a removal is a deprecation: other people's dashboards and alerts depend on these names.
- Base units: `_seconds`, `_bytes`, `_ratio`; a counter ends in `_total`, and nothing else does.
- Label values come from short fixed lists: no ids, no free text. `run` is from the configuration, `key` a published
  training key.
- A `role` family belongs to one process, which serves it at its `metrics` address. A `run` family covers the whole
  run, and only the dashboard serves it: never sum those over processes.
- The run's page is made from the newest snapshot; metrics that need an inspection are left out of other snapshots. A
  stall that has ended is 0, not absent, so that alerts end immediately. A wait that ends by itself is no stall.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.pipeline.roles import PARTICIPANTS
from sluice.pipeline.status.snapshot import Process, Snapshot, StallKind

Kind = Literal["counter", "gauge", "histogram"]
Page = Literal["role", "gateway", "rollout-server", "run"]

_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROLLOUT_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 600)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric; `roles` and `fact` apply to those that a process takes from its heartbeat."""

    name: str
    kind: Kind
    doc: str
    page: Page
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # for a histogram, in its unit, without the last (infinity)
    roles: tuple[str, ...] = ()  # empty: every role
    fact: str | None = None  # in the heartbeat


def _role(
    name: str,
    doc: str,
    *roles: str,
    kind: Kind = "gauge",
    fact: str | None = None,
    labels: tuple[str, ...] = ("role",),
    buckets: tuple[float, ...] = (),
) -> Family:
    return Family(
        name=f"sluice_{name}", kind=kind, doc=doc, page="role", labels=labels, roles=roles, fact=fact, buckets=buckets
    )


def _fact(name: str, doc: str, fact: str, *roles: str) -> Family:
    return _role(name, doc, *roles, fact=fact, kind="counter" if name.endswith("_total") else "gauge")


def _timed(name: str, doc: str, role: str, buckets: tuple[float, ...] = _LONG_S) -> Family:
    return _role(name, doc, role, kind="histogram", buckets=buckets)


def _other(page: Page, name: str, doc: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
    kind: Kind = "histogram" if buckets else "counter" if name.endswith("_total") else "gauge"
    return Family(name=f"sluice_{name}", kind=kind, doc=doc, page=page, labels=labels, buckets=buckets)


def _gateway(name: str, doc: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
    return _other("gateway", f"gateway_{name}", doc, *labels, buckets=buckets)


def _server(name: str, doc: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
    return _other("rollout-server", name, doc, *labels, buckets=buckets)


def _run(name: str, doc: str, *labels: str) -> Family:
    return _other("run", f"run_{name}", doc, *labels)


_PROCESS = [
    _role("role_info", "1; the role of this process, and its version of Sluice", labels=("role", "version")),
    _role(
        "lost_threads",
        "threads of renderings, grammars, tools and environments that outlived their deadline",
    ),
    _role("waiting_seconds", "how long it has been waiting for what its heartbeat names; 0 while it works"),
    _role("process_cpu_seconds_total", "processor time, user and system", kind="counter", labels=()),
    _role("process_resident_memory_bytes", "memory in use", labels=()),
    _role("process_virtual_memory_bytes", "address space in use", labels=()),
    _role("process_start_time_seconds", "when it started, Unix time: a change is a restart", labels=()),
    _role("process_open_fds", "open file descriptors", labels=()),
    _role("process_max_fds", "limit on open file descriptors", labels=()),
    _fact("exported_spans_total", "spans that a collector took", "spans_sent"),
    _fact("dropped_spans_total", "spans that were lost: the collector was away, or the queue full", "spans_dropped"),
    _fact("weight_version", "weight version in use", "version", "worker", "trainer", "scorer"),
    _fact(
        "weight_fallbacks_total",
        "versions that came a longer way than that of weights.transport",
        "weight_fallbacks",
        "worker",
        "trainer",
    ),
    _fact("decoded_tokens_total", "tokens sampled, of committed sequences", "tokens", "worker"),
    _fact("decoded_sequences_total", "sequences committed", "sequences", "worker"),
    _fact("running_sequences", "sequences in the engine", "running", "worker"),
    _fact("fetched_images_total", "images read or downloaded", "images_fetched", "worker"),
    _fact("processed_images_total", "images that went through the model's processor", "images_processed", "worker"),
    _timed("queue_seconds", "from enqueueing a job to decoding its sequence", "worker"),
    _timed("decode_seconds", "decoding of one sequence, all its attempts", "worker"),
    _fact("handed_on_samples_total", "samples handed on to the trainer", "handed", "consumer"),
    _fact("pending_samples", "samples waiting for a full batch", "pending", "consumer"),
    _fact("open_groups", "groups waiting for their other sequences", "open_groups", "consumer"),
    _timed("hand_off_samples", "samples of one batch handed on", "consumer", _SAMPLES),
    _timed("reward_seconds", "your reward functions on one sequence, all of them", "consumer"),
    _fact("reward_failures_total", "sequences dropped because a reward function failed", "reward_failures", "consumer"),
    _fact("train_steps_total", "optimiser steps of the run; a resumed trainer continues", "step", "trainer"),
    _fact("trained_samples_total", "samples trained in the run", "samples", "trainer"),
    _timed("train_step_seconds", "one optimiser step, its checkpoint left out", "trainer"),
    _fact("scored_sequences_total", "sequences scored", "scored", "scorer"),
    _fact("asked_rollouts", "rollouts that a rollout server is running for it", "rollouts", "producer"),
    _fact("answered_rollouts_total", "rollouts answered", "answered", "producer"),
    _fact("failed_rollouts_total", "answered rollouts that ended in an error", "failed", "producer"),
    _fact("llm_calls_total", "calls of the model in the answered rollouts", "llm_calls", "producer"),
]

_GATEWAY = [
    _gateway("requests_total", "requests answered; 499: the caller left", "route", "status"),
    _gateway("request_seconds", "until the last byte of the answer", "route", buckets=_LONG_S),
    _gateway("tokens_total", "tokens answered: prompt, completion", "kind"),
    _gateway("in_flight", "requests in flight"),
    _gateway("rollouts_total", "rollouts opened, forked, published, dropped", "event"),
    _gateway("resyncs_total", "turns whose sampled text renders differently"),
]

_ROLLOUT_SERVER = [
    _server("rollouts_total", "rollouts that ended", "status", "finish_reason", "category"),
    _server("rollout_seconds", "a whole rollout", "status", buckets=_ROLLOUT_S),
    _server("rollout_llm_seconds", "one call of the model", buckets=_ROLLOUT_S),
    _server("rollout_tool_seconds", "the tools of one turn", buckets=_ROLLOUT_S),
    _server("rollout_tool_calls_total", "tool calls"),
    _server("rollout_retries_total", "retried calls", "reason"),
    _server("rollout_resyncs_total", "sampled turns that render differently"),
    _server("rollout_drifts_total", "prompts that differ from the expected ones"),
    _server("rollout_finishes_total", "finish calls to the trainer", "outcome"),
    _server("rollout_callbacks_total", "answers sent by callback", "outcome"),
    _server("rollout_refused_total", "rollouts refused", "reason"),
    _server("rollouts_running", "running rollouts"),
    _server("rollouts_waiting", "queued rollouts"),
]

_RUN = [
    _run("info", "1; the run's name and state", "run", "state"),
    _run("looked_at_seconds", "when these numbers were read, Unix time of the broker"),
    _run(
        "sequences_total",
        "sequences that reached a state; each counts in all it passed; answered: to a caller or an agent",
        "state",
    ),
    _run("expected_sequences", "sequences in the source, once known"),
    _run("tokens_total", "tokens sampled, of committed sequences"),
    _run("redelivered_jobs_total", "jobs handed to another worker"),
    _run("malformed_rows_total", "malformed rows of the data, skipped"),
    _run("queued_jobs", "jobs in the queue, in any state"),
    _run("jobs", "jobs in the queue by state", "state"),
    _run("job_oldest_seconds", "age of the next ready job"),
    _run("open_rollouts", "agent rollouts that have not ended"),
    _run("stream_entries", "entries of a stream: results by partition, batches, score jobs", "stream"),
    _run("stream_unread_entries", "entries of a stream that its owner has not read", "stream"),
    _run("stream_oldest_seconds", "age of the oldest entry of a stream", "stream"),
    _run("credit_used_sequences", "unfinished sequences"),
    _run("credit_limit_sequences", "producer.max_in_flight"),
    _run("credit_used_bytes", "bytes that unfinished sequences hold in the broker"),
    _run("credit_limit_bytes", "limit on these bytes; producer.max_in_flight_mb"),
    _run("weight_version", "newest registered weights"),
    _run("version_lag", "versions between the newest and the oldest in use by a worker"),
    _run("dead_letters", "dead letters not yet replayed or dropped"),
    _run("processes", "processes by role; failed: it ended with an error; dead: it went silent", "role", "state"),
    _run(
        "stalls",
        "1 while this blocks the run, 0 for waits that resolve by themselves; see `sluice status --why`",
        "kind",
    ),
    _run("broker_used_bytes", "memory of the broker"),
    _run("broker_limit_bytes", "memory limit of the broker, if it has one"),
    _run("broker_refused_writes_total", "writes that the broker refused for lack of memory"),
    _other("run", "train_metric", "newest value of a training key (pipeline/telemetry/training_metrics.py)", "key"),
]

FAMILIES: dict[str, Family] = {f.name: f for f in (*_PROCESS, *_GATEWAY, *_ROLLOUT_SERVER, *_RUN)}
"""Every metric by its name."""

SEQUENCE_STATES = (
    "enqueued", "committed", "answered", "accepted", "trained", "dead", "dropped", "evaluated", "replayed",
)  # fmt: skip
JOB_STATES = ("ready", "running", "deferred", "alone")
PROCESS_STATES = ("alive", "failed", "dead")


def of_role(role: str) -> list[Family]:
    """The families that a process of the role serves."""
    return [family for family in _PROCESS if not family.roles or role in family.roles]


def series(family: Family) -> list[str]:
    """The names under which its samples are stored.

    >>> series(FAMILIES["sluice_queue_seconds"])
    ['sluice_queue_seconds_bucket', 'sluice_queue_seconds_count', 'sluice_queue_seconds_sum']
    """
    if family.kind == "histogram":
        return [f"{family.name}_{part}" for part in ("bucket", "count", "sum")]
    return [family.name]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Otherwise each counter gets a second series, `_created`, that is in no table and that nothing reads.
disable_created_metrics()


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Raises KeyError for a name that isn't in the table."""
    family = FAMILIES[name]
    return Counter(name, family.doc, family.labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Raises KeyError for a name that isn't in the table."""
    family = FAMILIES[name]
    return Gauge(name, family.doc, family.labels, registry=registry)


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    """Raises KeyError for a name that isn't in the table."""
    family = FAMILIES[name]
    return Histogram(name, family.doc, family.labels, buckets=family.buckets, registry=registry)


def read(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A counter or gauge read at scrape time; values by labels, in the table's order."""
    family = FAMILIES[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = kind(name, family.doc, labels=family.labels)
    for labels, value in values:
        made.add_metric(labels, value)
    return made


def page(registry: CollectorRegistry) -> bytes:
    """The text format."""
    return generate_latest(registry)


def run_page(now: Snapshot) -> bytes:
    """The run's page in the text format (`CONTENT_TYPE`)."""
    registry = CollectorRegistry()
    registry.register(_Run(now))
    return page(registry)


def run_metrics(now: Snapshot) -> Iterator[Metric]:
    """Every family of the run."""
    yield read("sluice_run_info", [((now.run, now.state), 1.0)])
    # A counter that falls looks like one that began anew at 0: what has left a state counts there as before.
    left = {"enqueued": now.answered, "accepted": now.withdrawn}
    reached = {state: getattr(now, state) + left.get(state, 0) for state in SEQUENCE_STATES}
    yield read("sluice_run_sequences_total", [((state,), float(count)) for state, count in reached.items()])
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
    found = collections.Counter((row.role, _state(row)) for row in rows)
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
