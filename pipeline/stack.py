"""Every process of a run on this machine: broker if need be, roles supervised, progress shown, to the run's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from pipeline import broker as connections
from pipeline import logs, provenance
from pipeline.config import Config
from pipeline.config.load import ENVIRONMENT
from pipeline.deaths import Deaths
from pipeline.embedded import embedded_broker
from pipeline.files import write_atomic
from pipeline.http.ports import free_port
from pipeline.progress import Progress
from pipeline.status import Snapshot
from pipeline.supervise import Supervisor, sluice_command
from pipeline.terminal import say
from pipeline.watchman import Watch, Watchman

INTERRUPTED = 130
OPTIONAL = frozenset({"dashboard"})  # processes that a run can do without
_GO_ON = "start the same command again to go on from here"


def with_workers(config: Config, count: int) -> Config:
    """The same configuration with another number of workers."""
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, count=count))


def with_dashboard_port(config: Config) -> Config:
    """The same configuration with a free port for the dashboard where its own is taken, or 0."""
    dashboard = config.dashboard
    if not dashboard.enabled:
        return config
    port = free_port(dashboard.host, dashboard.port)
    return msgspec.structs.replace(config, dashboard=msgspec.structs.replace(dashboard, port=port))


def run_stack(
    config: Config, *, title: str, watch: Watch | None = None, extra: dict[str, list[str]] | None = None
) -> int:
    """Run every role, and `extra` commands beside them, to the end of the run.

    Returns 0 when it is complete, 130 when interrupted. `watch` is called with every snapshot.
    """
    logs.configure("up")
    with contextlib.ExitStack() as scope:
        if config.broker.url is None:
            url = scope.enter_context(embedded_broker(config.broker))
            settings = msgspec.structs.replace(config.broker, url=url)
            config = msgspec.structs.replace(config, broker=settings)
        connections.refuse_unsafe(config.broker, connections.ping(config.broker, config.run))
        return asyncio.run(_supervised(with_dashboard_port(config), title, watch, extra or {}))


def plan(config: Config, resolved: Path) -> dict[str, list[str]]:
    """Process name → command."""
    with_file = ("-c", str(resolved))
    roles = {} if config.trainer.external else {"trainer": sluice_command("train", *with_file)}
    roles["producer"] = sluice_command("produce", *with_file)
    for index in range(config.consumer.count):
        roles[f"consumer-{index}"] = sluice_command("consume", *with_file, "--partition", str(index))
    for index in range(config.worker.count):
        roles[f"worker-{index}"] = sluice_command("worker", *with_file)
    for index in range(config.scorer.count if config.policy.enabled and not config.trainer.external else 0):
        roles[f"scorer-{index}"] = sluice_command("score", *with_file)
    for index in range(config.gateway.count):
        roles[f"gateway-{index}"] = sluice_command("gateway", *with_file, "--index", str(index))
    for index in range(config.rollout_server.count):
        roles[f"rollout-server-{index}"] = sluice_command("rollout-server", *with_file, "--index", str(index))
    if config.dashboard.enabled:
        roles["dashboard"] = sluice_command("dashboard", *with_file)
    return roles


def addresses(config: Config) -> list[str]:
    """Where this run's servers listen, in words."""
    gateway, server, dashboard = config.gateway, config.rollout_server, config.dashboard
    found = [f"dashboard http://{dashboard.host}:{dashboard.port}"] if dashboard.enabled else []
    found += [f"gateway http://{gateway.host}:{gateway.port + index}/v1" for index in range(gateway.count)]
    return found + [f"rollout server http://{server.host}:{server.port + index}" for index in range(server.count)]


def child_environment(config: Config) -> dict[str, str]:
    """URLs and bearer keys go by environment: secrets belong in no file. Other settings are in the resolved file."""
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    urls = {
        "REDIS_URL": config.broker.url,
        "SLUICE_ROLLOUT_URL": config.rollout.url,
        "SLUICE_GATEWAY_URL": config.rollout.gateway_url,
    }
    return {**inherited, **{name: url for name, url in urls.items() if url}}


async def _supervised(config: Config, title: str, watch: Watch | None, extra: dict[str, list[str]]) -> int:
    run_dir = Path(config.run_dir) / config.run
    resolved = provenance.store(config, run_dir)
    client = connections.connect(config.broker, config.run)
    supervisor = Supervisor(config.up, run_dir / "logs", child_environment(config), Deaths(client, config).settle)
    for name, command in {**plan(config, resolved), **extra}.items():
        supervisor.add(name, command, optional=name in OPTIONAL)
    try:
        with Progress(title) as progress:
            for place in (f"files {run_dir}", f"logs {supervisor.log_dir}", *addresses(config)):
                progress.say(place)
            watchman = Watchman(client, config, supervisor, progress, watch)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, watchman.stop.set)
            final = await watchman.run()
        if final is None:
            say(f"interrupted; the broker is gone; {_GO_ON}", file=sys.stderr)
            return INTERRUPTED
        write_atomic(run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(final)))
        return _report(final, run_dir, interrupted=watchman.stop.is_set())
    finally:
        await client.aclose()


def _report(final: Snapshot, run_dir: Path, *, interrupted: bool) -> int:
    word = "interrupted" if interrupted else "complete" if final.complete else "stopped at trainer.max_versions"
    say(
        f"{word}: enqueued {final.enqueued}, trained {final.trained}, dead {final.dead}, dropped {final.dropped}, "
        f"weights v{final.latest_version}; files in {run_dir}",
        file=sys.stderr,
    )
    if interrupted:
        say(_GO_ON, file=sys.stderr)
    return INTERRUPTED if interrupted else 0
