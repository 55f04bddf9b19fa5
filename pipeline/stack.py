"""Every process of a run on this machine: broker if need be, roles supervised, progress shown, to the run's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import broker as connections
from pipeline import logs, provenance
from pipeline.config import Config
from pipeline.config.load import ENVIRONMENT
from pipeline.embedded import embedded_broker
from pipeline.errors import BrokerError
from pipeline.files import write_atomic
from pipeline.keys import Keys
from pipeline.progress import Progress
from pipeline.status import Snapshot, snapshot
from pipeline.supervise import Supervisor, sluice_command

Watch = Callable[[Snapshot, Supervisor, Progress], Awaitable[None]]
_LOOK_S = 0.25
_LAST_LOOK_S = 5.0


def with_workers(config: Config, count: int) -> Config:
    """The same configuration with another number of workers."""
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, count=count))


def run_stack(
    config: Config, *, title: str, watch: Watch | None = None, extra: dict[str, list[str]] | None = None
) -> int:
    """Run every role, and `extra` commands beside them, to the end of the run.

    Returns 0 when it is complete, 130 when interrupted. `watch` is called with every snapshot.
    """
    with contextlib.ExitStack() as scope:
        if config.broker.url is None:
            url = scope.enter_context(embedded_broker(config.broker))
            settings = msgspec.structs.replace(config.broker, url=url)
            config = msgspec.structs.replace(config, broker=settings)
        connections.ping(config.broker)
        return asyncio.run(_supervised(config, title, watch, extra or {}))


def plan(config: Config, resolved: Path) -> dict[str, list[str]]:
    """Process name → command."""
    with_file = ("-c", str(resolved))
    roles = {"trainer": sluice_command("train", *with_file), "producer": sluice_command("produce", *with_file)}
    for index in range(config.consumer.count):
        roles[f"consumer-{index}"] = sluice_command("consume", *with_file, "--partition", str(index))
    for index in range(config.worker.count):
        roles[f"worker-{index}"] = sluice_command("worker", *with_file)
    return roles


def child_environment(config: Config) -> dict[str, str]:
    """The URL goes by environment: passwords belong in no file. Other settings are in the resolved file alone."""
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return {**inherited, "REDIS_URL": config.broker.url or ""}


async def _supervised(config: Config, title: str, watch: Watch | None, extra: dict[str, list[str]]) -> int:
    logs.configure("up")
    run_dir = Path(config.run_dir) / config.run
    resolved = provenance.store(config, run_dir)
    supervisor = Supervisor(config.up, run_dir / "logs", child_environment(config))
    for name, command in {**plan(config, resolved), **extra}.items():
        supervisor.add(name, command)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client = connections.connect(config.broker)
    keys = Keys(config.run)
    try:
        await cast(Any, client).hset(keys.source, "exhausted", "0")  # the producer says so anew
        with Progress(title) as progress:

            async def look() -> None:
                now = await snapshot(client, keys)
                progress.update(now)
                if watch:
                    await watch(now, supervisor, progress)

            await _until_trained(supervisor, stop, look)
        final = await _last_look(client, keys, run_dir)
    finally:
        await client.aclose()
    return _report(final, run_dir, interrupted=stop.is_set())


async def _until_trained(supervisor: Supervisor, stop: asyncio.Event, look: Callable[[], Awaitable[None]]) -> None:
    """Look again and again until the trainer is done or a stop is asked for; all children have ended then."""
    care = asyncio.create_task(supervisor.run())
    try:
        while not stop.is_set() and not supervisor.children["trainer"].done:
            await look()
            if care.done():
                care.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
    finally:
        care.cancel()
        await asyncio.gather(care, return_exceptions=True)
        await supervisor.stop()


async def _last_look(client: Redis, keys: Keys, run_dir: Path) -> Snapshot:
    """The final state, also as summary.json."""
    try:
        final = await asyncio.wait_for(snapshot(client, keys), _LAST_LOOK_S)
    except (TimeoutError, RedisError, OSError) as error:
        raise BrokerError(f"the broker was gone at the end ({error}); start the run again to go on") from error
    write_atomic(run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(final)))
    return final


def _report(final: Snapshot, run_dir: Path, *, interrupted: bool) -> int:
    word = "interrupted" if interrupted else "complete" if final.complete else "stopped at trainer.max_versions"
    print(
        f"{word}: enqueued {final.enqueued}, trained {final.trained}, dead {final.dead}, dropped {final.dropped}, "
        f"weights v{final.latest_version}; files in {run_dir}",
        file=sys.stderr,
    )
    if interrupted:
        print("start the same command again to go on from here", file=sys.stderr)
    return 130 if interrupted else 0
