"""`sluice status`: one look at a run."""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec

from pipeline import broker as connections
from pipeline.cli.options import ConfigPath, Overrides
from pipeline.config import Config, load_config
from pipeline.heartbeat import ALIVE_S
from pipeline.keys import Keys
from pipeline.status import Snapshot, snapshot


def status(
    *, config: ConfigPath = None, overrides: Overrides = (), json: bool = False, health: str | None = None
) -> int:
    """Show a run's counts, versions and processes.

    `--health ROLE` prints nothing and exits 0 when the broker answers and this host has a live process of the role
    (for container health checks).
    """
    settings = load_config(config, overrides)
    connections.ping(settings.broker)
    now = asyncio.run(_read(settings))
    if health is not None:
        return 0 if any(row.host == socket.gethostname() for row in now.alive(health)) else 1
    if json:
        print(msgspec.json.encode(now).decode())
        return 0
    _print(now)
    return 0


async def _read(settings: Config) -> Snapshot:
    client = connections.connect(settings.broker)
    try:
        return await snapshot(client, Keys(settings.run))
    finally:
        await client.aclose()


def _print(now: Snapshot) -> None:
    print(f"run {now.run}: {'complete' if now.complete else now.state}, weights v{now.latest_version}")
    print(
        f"  enqueued {now.enqueued} = trained {now.trained} + dead {now.dead} + dropped {now.dropped} "
        f"+ in flight {now.enqueued - now.ended}"
    )
    print(f"  jobs queued or leased {now.queued_jobs}, batches waiting {now.waiting_batches}, tokens {now.tokens}")
    for reason, count in sorted(now.reasons.items()):
        print(f"  {reason} {count}")
    clock = time.time()
    for row in now.processes:
        age = clock - row.at
        life = "" if age < ALIVE_S else f"  NO HEARTBEAT for {age:.0f} s"
        cause = f"waits for {row.waiting_for}, {clock - row.waiting_since:.0f} s" if row.waiting_since else "working"
        facts = " ".join(f"{key}={value}" for key, value in row.facts.items())
        print(f"  {row.name:<16} pid {row.pid:<8} {cause}  {facts}{life}")
