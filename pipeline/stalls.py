"""Why a run stands still, in sentences: what waits for what, since when, and what to do. Pure, of one close look.

    broker ─▶ roles that failed ─▶ roles that nobody plays ─▶ old weights ─▶ lag ─▶ credit ─▶ jobs that run alone

- The causes come before what follows from them. A complete run has none, nor one that never began.
- A sentence is told from a wait that ends by itself by `blocks`.
"""

from __future__ import annotations

from pipeline.stall_flow import broker_full, consumer_lag, credit_used_up, old_versions, runs_alone, unreadable
from pipeline.stall_roles import failed, nobody
from pipeline.status import Snapshot
from pipeline.status_parts import Stall, StallKind

__all__ = ["Stall", "StallKind", "stalls"]


def stalls(now: Snapshot) -> list[Stall]:
    """What keeps the run, of a close look (status_inspect.inspect)."""
    if now.complete or not (now.enqueued or now.processes or now.unreadable):
        return []
    found = [*broker_full(now), *unreadable(now), *failed(now)]
    if not any(row.is_alive and not row.is_onlooker for row in now.processes):
        return [*found, _no_process(now)]
    found += [*nobody(now), *old_versions(now), *consumer_lag(now)]
    return [*found, *credit_used_up(now), *runs_alone(now)]


def _no_process(now: Snapshot) -> Stall:
    return Stall(
        kind="no_process",
        says=f"no process is alive, {now.credit.sequences:,} sequences are in flight",
        since=max((row.ended_at or row.at for row in now.processes), default=None),
        remedy="start `sluice run` or `sluice up` again with the same configuration: it goes on from here",
    )
