"""`sluice status` and `sluice status --why` as text and as JSON."""

from __future__ import annotations

import asyncio
import shutil
import socket
import textwrap
import time

import msgspec

from sluice.pipeline.broker import connection
from sluice.pipeline.config import Config
from sluice.pipeline.roles import position
from sluice.pipeline.status.descriptions import (
    condition,
    credit,
    doing,
    enqueued,
    evaluation,
    guard,
    policy,
    stall_text,
    stepped,
    verdict_text,
    waits,
)
from sluice.pipeline.status.heartbeat import HIDDEN_FACTS
from sluice.pipeline.status.inspection import Why, inspect
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.status.snapshot import Lag, Lease, Process, Snapshot, Stall
from sluice.pipeline.status.text import length
from sluice.pipeline.terminal import columns
from sluice.pipeline.wire.keys import Keys

_WIDTH = 100
_LEASES = 8  # lines


def look(config: Config) -> Snapshot:
    """Read the run's state; raises BrokerError if the broker doesn't answer."""
    connection.ping(config.broker, config.run)
    return asyncio.run(_read(config))


def is_healthy(now: Snapshot, role: str) -> bool:
    """Whether this host has a live process of the role."""
    return any(row.host == socket.gethostname() for row in now.alive(role))


def as_text(now: Snapshot) -> str:
    """For people: totals first, then what blocks the run, then what each process does."""
    version = "no weights yet" if now.latest_version is None else f"weights v{now.latest_version}"
    lines = [f"run {now.run}: {condition(now)}, {version}", *columns(_sums(now))]
    lines += [f"  ! {stall_text(now, stall).says}" for stall in now.stalls]
    if now.processes:
        lines += ["", "processes", *columns([_process(row) for row in sorted(now.processes, key=_place)])]
    if now.leases:
        running = now.depth.running if now.depth else 0
        more = f" (the oldest {_LEASES} of {running})" if running > _LEASES else ""
        head = ["job", "worker", "attempt", "enqueued", "held for", "lease left", "done"]
        rows = [head, *(_lease(lease) for lease in now.leases[:_LEASES])]
        lines += ["", f"leases{more}", *columns(rows)]
    if any(lag.entries for lag in now.lag):
        lines += ["", "streams", *columns([_lag(lag) for lag in now.lag])]
    return "\n".join(lines)


def as_json(now: Snapshot) -> dict[str, object]:
    """The snapshot's fields; stalls with their text, and `waits`: text on what blocks the run and its processes."""
    stalls = [
        {**msgspec.to_builtins(stall), "says": told.says, "remedy": told.remedy}
        for stall in now.stalls
        for told in (stall_text(now, stall),)
    ]
    return {**msgspec.to_builtins(now, str_keys=True), "stalls": stalls, "waits": waits(now)}


def why_json(why: Why) -> dict[str, object]:
    """The snapshot's fields, and `verdict`."""
    verdict = {**msgspec.to_builtins(why.verdict), "says": verdict_text(why.now, why.verdict)}
    return {**as_json(why.now), "verdict": verdict}


def why_text(why: Why, width: int | None = None) -> str:
    """The verdict, then each stall: what, since when, remedy; then what each process reports."""
    now, width = why.now, min(_WIDTH, width or shutil.get_terminal_size((_WIDTH, 24)).columns)
    lines = [f"run {now.run}: {condition(now)}", *_wrapped(verdict_text(now, why.verdict), width, "  ", "  ")]
    for number, stall in enumerate(now.stalls, 1):
        lines += ["", *_numbered(number, stall, now, width)]
    alive = [] if now.complete else [row for row in now.processes if row.is_alive]
    lines += ["", "what each process reports"] if alive else []
    for row in alive:
        lines += _wrapped(f"{row.name} {doing(row)}", width, "  ", "    ")
    return "\n".join(lines)


def _numbered(number: int, stall: Stall, now: Snapshot, width: int) -> list[str]:
    told = stall_text(now, stall)
    lines = _wrapped(told.says, width, f"{number}. ", "   ")
    if stall.since is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stall.since))
        lines.append(f"   since:  {clock} ({length(now.at - stall.since)})")
    if not stall.blocks:
        lines.append("   this resolves by itself as long as the rest keeps running")
    return lines + _wrapped(told.remedy, width, "   do:     ", "           ")


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _sums(now: Snapshot) -> list[list[str]]:
    rows = [
        [
            "sequences",
            f"enqueued {enqueued(now)} = trained {now.trained:,}{stepped(now)} + dead {now.dead:,} "
            f"+ dropped {now.dropped:,} + in flight {now.credit.sequences:,}",
        ]
    ]
    depth = now.depth
    if depth is not None:
        words = [f"{depth.ready:,} ready", f"{depth.running:,} running", f"{depth.deferred:,} deferred"]
        rows.append(["jobs", ", ".join([*words, *([f"{depth.alone:,} to run alone"] if depth.alone else [])])])
    if now.attempts and list(now.attempts) != ["1"]:
        tries = ", ".join(f"{count:,} in attempt {attempt}" for attempt, count in now.attempts.items())
        rows.append(["attempts", tries + (f"; {now.deaths:,} deaths of workers over them" if now.deaths else "")])
    if evaluated := evaluation(now):
        rows.append(["eval", evaluated])
    if now.open_rollouts:
        rows.append(["rollouts", f"{now.open_rollouts:,} open"])
    rows.append(["credit", f"{credit(now.credit)} in use"])
    if watched := guard(now):
        rows.append(["guard", watched])
    if trained := policy(now):
        rows.append(["policy", trained])
    if now.redelivered_jobs or now.replayed:
        rows.append(["again", f"{now.redelivered_jobs:,} jobs redelivered, {now.replayed:,} dead sequences replayed"])
    reasons = ", ".join(f"{name.replace(':', ' ', 1)} {count:,}" for name, count in sorted(now.reasons.items()))
    if reasons:
        rows.append(["reasons", reasons])
    if now.dead_letters:
        rows.append(["dead", f"{now.dead_letters:,} wait to be replayed or dropped: `sluice dlq list`"])
    if now.malformed_rows:
        rows.append(["data", f"{now.malformed_rows:,} malformed rows skipped"])
    return rows


def _place(row: Process) -> tuple[int, str]:
    return (position(row.role), row.name)


def _process(row: Process) -> list[str]:
    if row.ended_at is not None:
        state = f"FAILED {length(row.age_s)} ago: {row.error}"
    elif not row.is_alive:
        state = f"NO HEARTBEAT for {length(row.age_s)}"
    else:
        state = "working" if row.wait is None else doing(row)
    facts = ", ".join(f"{key} {value}" for key, value in row.facts.items() if key not in HIDDEN_FACTS)
    return [row.name, f"{row.host} {row.pid}", facts or "-", state]


def _lease(lease: Lease) -> list[str]:
    left = f"{lease.left_s:.1f} s" + (", alone" if lease.alone else "")
    held = "-" if lease.held_s is None else length(lease.held_s)
    done = f"{lease.committed} of {lease.sequences}"
    return [lease.job_id, lease.worker, str(lease.attempt), f"{length(lease.age_s)} ago", held, left, done]


def _lag(lag: Lag) -> list[str]:
    oldest = "" if lag.oldest_s is None else f"oldest {length(lag.oldest_s)}"
    return [lag.stream, f"{lag.entries:,} entries", f"{lag.taken:,} taken, not acked", oldest]


async def _read(config: Config) -> Snapshot:
    client = connection.connect(config.broker, config.run)
    try:
        return await inspect(client, Keys(config.run), config.consumer.count, run_directory(config))
    finally:
        await client.aclose()
