"""What Prometheus reads of a run's counts."""

from __future__ import annotations

from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.telemetry.families import run_metrics


def reached(now: Snapshot, state: str) -> float:
    """The counter of sequences that reached a state."""
    samples = (one for family in run_metrics(now) for one in family.samples)
    return next(
        one.value for one in samples if one.name == "sluice_run_sequences_total" and one.labels["state"] == state
    )
