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
        if now.exhausted:
            return "done", count, rate, "no job is left"
        return "waiting", count, rate, _idle(rates, "jobs", "no job waits or runs")
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
    return _stream(lags, rates, ("result", "results"), "the consumers", "committed", stuck=stuck)


def batches(now: Snapshot, rates: Rates) -> Told:
    """Batches that the trainer has not acked."""
    lags = [lag for lag in now.lag if lag.stream == "batches"]
    stuck = any(stall.kind in ("no_trainer", "trainer_dead") for stall in now.stalls)
    return _stream(lags, rates, ("batch", "batches"), "the trainer", "accepted", stuck=stuck)


def weights(now: Snapshot, rates: Rates) -> Told:
    """The newest version, and how far behind it the workers are."""
    if now.latest_version is None:
        says = "no weights are registered yet: the trainer does it once its model is loaded"
        return "waiting", "none", "", _idle(rates, "weights", says)
    age = "" if now.latest_at is None else f", published {length(now.at - now.latest_at)} ago"
    lag = now.version_lag
    behind = f"the oldest live worker is {counted(lag, 'version')} behind" if lag else "every live worker has it"
    if not now.alive("worker"):
        behind = "no live worker"
    state = "stalled" if any(stall.kind == "old_versions" and stall.blocks for stall in now.stalls) else "working"
    return "done" if now.complete else state, f"v{now.latest_version}", "", f"v{now.latest_version}{age}; {behind}"


def _stream(lags: list[Lag], rates: Rates, names: tuple[str, str], reader: str, passes: str, *, stuck: bool) -> Told:
    entries, taken = sum(lag.entries for lag in lags), sum(lag.taken for lag in lags)
    count, rate = counted(entries, *names), f"{rates.per_s(passes):,.1f} seq/s"
    if not entries:
        return "waiting", count, rate, _idle(rates, names[1], f"no {names[0]} waits for {reader}")
    oldest = max((lag.oldest_s for lag in lags if lag.oldest_s is not None), default=0.0)
    says = f"{entries - taken:,} unread, {taken:,} in the hands of {reader}; the oldest came {length(oldest)} ago"
    return "stalled" if stuck else "working" if taken else "waiting", count, rate, says


def _idle(rates: Rates, name: str, says: str) -> str:
    """With since when, as far as this process saw it."""
    seen = rates.idle(name)
    if seen is None:
        return says
    return f"{says} (for {'' if seen[1] else 'at least '}{length(seen[0])})"
