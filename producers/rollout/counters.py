"""Numbers of the rollout server for Prometheus, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from producers.rollout.line import Line
from producers.rollout.schemas import RolloutResponse

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 600)


class Counters:
    """What was done, and what is in hand."""

    def __init__(self, line: Line) -> None:
        self._registry = CollectorRegistry()
        to = self._registry
        self._rollouts = Counter(
            "sluice_rollouts", "Rollouts that ended", ["status", "finish_reason", "category"], registry=to
        )
        self._duration = Histogram(
            "sluice_rollout_seconds", "Of a whole rollout", ["status"], buckets=_SECONDS, registry=to
        )
        self.llm_s = Histogram("sluice_rollout_llm_seconds", "Of one call", buckets=_SECONDS, registry=to)
        self.tool_s = Histogram("sluice_rollout_tool_seconds", "Of one turn's tools", buckets=_SECONDS, registry=to)
        self.tool_calls = Counter("sluice_rollout_tool_calls", "Tool calls", registry=to)
        self.retries = Counter("sluice_rollout_retries", "Calls that were made again", ["reason"], registry=to)
        self.resyncs = Counter("sluice_rollout_resyncs", "Sampled turns that render differently", registry=to)
        self.drifts = Counter("sluice_rollout_drifts", "Prompts that were not the expected ones", registry=to)
        self.finishes = Counter("sluice_rollout_finishes", "Ends told to the trainer", ["outcome"], registry=to)
        self.callbacks = Counter("sluice_rollout_callbacks", "Answers called back", ["outcome"], registry=to)
        self.refused = Counter("sluice_rollout_refused", "Rollouts not taken", ["reason"], registry=to)
        Gauge("sluice_rollouts_running", "Rollouts that run", registry=to).set_function(lambda: line.running)
        Gauge("sluice_rollouts_waiting", "Rollouts in line", registry=to).set_function(lambda: line.waiting)

    def ended(self, answer: RolloutResponse) -> None:
        """One rollout has its answer."""
        category = answer.extra_fields.get("error_category", "")
        self._rollouts.labels(answer.status.value, answer.finish_reason or "", category).inc()
        self._duration.labels(answer.status.value).observe(answer.metrics.total_latency_ms / 1000)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
