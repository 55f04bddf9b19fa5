"""The stages that hold things: queue, results, batches, weights. Each gives (state, count, rate, sentence)."""

from __future__ import annotations

from typing import Literal

from pipeline.rates import Rates
from pipeline.status import Snapshot
from pipeline.status_parts import Lag
from pipeline.status_words import counted, length

Told = tuple[Literal["working", "waiting", "stalled", "done", "off"], str, str, str]


def queue(now: Snapshot, rates: Rates) -> Told:
    """Jobs that wait or run."""
    count, rate = counted(now.queued_jobs, "job"), f"{rates.per_s('committed'):,.1f} seq/s"
    if not now.queued_jobs:
        done = now.exhausted
        return "done" if done else "waiting", count, rate, "no job is left" if done else "no job waits or runs"
    depth = now.depth
    stuck = any(stall.kind in ("no_worker", "guard_refused") and stall.blocks for stall in now.stalls)
    if depth is None:
        return "stalled" if stuck else "working", count, rate, f"{count} ready or running"
    words = [f"{depth.running:,} running", f"{depth.ready:,} ready"]
    words += [f"{depth.deferred:,} deferred"] if depth.deferred else []
    words += [f"{depth.alone:,} to run alone"] if depth.alone else []
    oldest = "" if depth.oldest_s is None else f"; the next one was enqueued {length(depth.oldest_s)} ago"
    state = "stalled" if stuck else "working" if depth.running else "waiting"
    return state, count, rate, f"{', '.join(words)}{oldest}"


def results(now: Snapshot, rates: Rates) -> Told:
    """Finished sequences that the consumers have not handed on."""
    lags = [lag for lag in now.lag if lag.stream.startswith("results")]
    stuck = any(stall.kind in ("no_consumer", "consumer_lag") for stall in now.stalls)
    return _stream(lags, ("result", "results"), "the consumers", f"{rates.per_s('committed'):,.1f} seq/s", stuck=stuck)


def batches(now: Snapshot, rates: Rates) -> Told:
    """Batches that the trainer has not acked."""
    lags = [lag for lag in now.lag if lag.stream == "batches"]
    stuck = any(stall.kind in ("no_trainer", "trainer_dead") for stall in now.stalls)
    return _stream(lags, ("batch", "batches"), "the trainer", f"{rates.per_s('accepted'):,.1f} seq/s", stuck=stuck)


def weights(now: Snapshot, rates: Rates) -> Told:
    """The newest version, and how far behind it the workers are."""
    if now.latest_version is None:
        return "waiting", "none", "", "no weights are registered yet: the trainer does it once its model is loaded"
    age = "" if now.latest_at is None else f", published {length(now.at - now.latest_at)} ago"
    lag = now.version_lag
    behind = f"the oldest live worker is {counted(lag, 'version')} behind" if lag else "every live worker has it"
    if not now.alive("worker"):
        behind = "no live worker"
    state = "stalled" if any(stall.kind == "old_versions" and stall.blocks for stall in now.stalls) else "working"
    return "done" if now.complete else state, f"v{now.latest_version}", "", f"v{now.latest_version}{age}; {behind}"


def _stream(lags: list[Lag], names: tuple[str, str], reader: str, rate: str, *, stuck: bool) -> Told:
    entries, taken = sum(lag.entries for lag in lags), sum(lag.taken for lag in lags)
    count = counted(entries, *names)
    if not entries:
        return "waiting", count, rate, f"no {names[0]} waits for {reader}"
    oldest = max((lag.oldest_s for lag in lags if lag.oldest_s is not None), default=0.0)
    says = f"{entries - taken:,} unread, {taken:,} in the hands of {reader}; the oldest came {length(oldest)} ago"
    return "stalled" if stuck else "working" if taken else "waiting", count, rate, says
