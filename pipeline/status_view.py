"""A snapshot as text and as JSON."""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec

from pipeline import broker
from pipeline.config import Config
from pipeline.heartbeat import ALIVE_S, Heartbeat
from pipeline.keys import Keys
from pipeline.status import Snapshot, snapshot


def look(config: Config) -> Snapshot:
    """Read the run's state; raises BrokerError when the broker does not answer."""
    broker.ping(config.broker)
    return asyncio.run(_read(config))


def is_healthy(now: Snapshot, role: str) -> bool:
    """Whether this host has a live process of the role."""
    return any(row.host == socket.gethostname() for row in now.alive(role))


def as_json(now: Snapshot) -> str:
    """One object, `schema_version` first."""
    return msgspec.json.encode(now).decode()


def as_text(now: Snapshot) -> str:
    """For people."""
    in_flight = now.enqueued - now.ended
    lines = [
        f"run {now.run}: {'complete' if now.complete else now.state}, weights v{now.latest_version}",
        f"  enqueued {now.enqueued} = trained {now.trained} + dead {now.dead} + dropped {now.dropped} "
        f"+ in flight {in_flight}",
        f"  jobs queued or leased {now.queued_jobs}, batches waiting {now.waiting_batches}, tokens {now.tokens}, "
        f"malformed rows skipped {now.malformed_rows}",
    ]
    lines += [f"  {reason} {count}" for reason, count in sorted(now.reasons.items())]
    return "\n".join([*lines, *(_process(row, time.time()) for row in now.processes)])


def _process(row: Heartbeat, clock: float) -> str:
    age = clock - row.at
    life = "" if age < ALIVE_S else f"  NO HEARTBEAT for {age:.0f} s"
    waits = f"waits for {row.waiting_for}, {clock - row.waiting_since:.0f} s" if row.waiting_since else "working"
    facts = " ".join(f"{key}={value}" for key, value in row.facts.items())
    return f"  {row.name:<16} pid {row.pid:<8} {waits}  {facts}{life}"


async def _read(config: Config) -> Snapshot:
    client = broker.connect(config.broker)
    try:
        return await snapshot(client, Keys(config.run))
    finally:
        await client.aclose()
