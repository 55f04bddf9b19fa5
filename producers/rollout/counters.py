"""Numbers of the rollout server for Prometheus; names and labels are in pipeline/telemetry/families.py."""

from __future__ import annotations

from pipeline.telemetry.exporter import Telemetry
from pipeline.telemetry.families import counter, gauge, histogram, page
from producers.rollout.line import Line
from producers.rollout.schemas import RolloutResponse


class Counters:
    """What was done, and what is in hand; on the server's `/metrics` and at its `metrics` address."""

    def __init__(self, line: Line) -> None:
        self.telemetry = Telemetry("rollout-server")
        to = self.telemetry.registry
        self._rollouts = counter("sluice_rollouts_total", to)
        self._duration = histogram("sluice_rollout_seconds", to)
        self.llm_s = histogram("sluice_rollout_llm_seconds", to)
        self.tool_s = histogram("sluice_rollout_tool_seconds", to)
        self.tool_calls = counter("sluice_rollout_tool_calls_total", to)
        self.retries = counter("sluice_rollout_retries_total", to)
        self.resyncs = counter("sluice_rollout_resyncs_total", to)
        self.drifts = counter("sluice_rollout_drifts_total", to)
        self.finishes = counter("sluice_rollout_finishes_total", to)
        self.callbacks = counter("sluice_rollout_callbacks_total", to)
        self.refused = counter("sluice_rollout_refused_total", to)
        gauge("sluice_rollouts_running", to).set_function(lambda: line.running)
        gauge("sluice_rollouts_waiting", to).set_function(lambda: line.waiting)

    def ended(self, answer: RolloutResponse) -> None:
        """One rollout has its answer."""
        category = answer.extra_fields.get("error_category", "")
        self._rollouts.labels(answer.status.value, answer.finish_reason or "", category).inc()
        self._duration.labels(answer.status.value).observe(answer.metrics.total_latency_ms / 1000)

    def text(self) -> bytes:
        """The exposition format."""
        return page(self.telemetry.registry)
