"""Processes of one run: a worker, a gateway, and a rollout server where it is asked for.

| waits for          | at most  |
|--------------------|----------|
| a server's /health | _START_S |
| a worker's engine  | _START_S |
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sluice.bench.processes import Fleet
from sluice.bench.proximal.engines import environment
from sluice.bench.rollout.http import is_healthy
from sluice.bench.rollout.plan import Sizes
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.producers.rollout_client.peer import KEY_NAMES

MODEL_NAME = "policy"
_START_S = 300.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Place:
    """Where a run of the bench finds its things."""

    home: Path
    url: str  # of the broker
    model: Path


@dataclass(frozen=True)
class Stack:
    """Base URLs of what runs; without a rollout server nobody listens at that of `server`."""

    gateway: str
    server: str


def settings(place: Place, backend: str, max_batch: int, sizes: Sizes) -> list[str]:
    """`--set` values of a run's configuration, for its processes and for the engine that is called directly."""
    low, high = sizes.tool_latency_ms
    return [
        f"run=bench-{backend}",
        f"run_dir={place.home}",
        f"model.path={place.model}",
        "model.dtype=float32",
        f"worker.backend={backend}",
        f"worker.max_batch={max_batch}",
        "worker.claim_gpu=false",
        "worker.torch_threads=1",
        "worker.drain_s=0",
        "worker.vllm.enforce_eager=true",
        f"gateway.model_name={MODEL_NAME}",
        f"rollout_server.max_concurrent_rollouts={sizes.rollouts}",
        f"rollout_server.tool_latency_ms=[{low},{high}]",
        "rollout_matching.task=exact_answer",
    ]


@contextlib.asynccontextmanager
async def running(
    place: Place, chosen: Sequence[str], session: aiohttp.ClientSession, *, with_server: bool
) -> AsyncIterator[Stack]:
    """All of them ready; they end with the block."""
    run = chosen[0].partition("=")[2]
    gateway, server = free_ports(2)
    chosen = [*chosen, f"gateway.port={gateway}", f"rollout_server.port={server}"]
    options = [part for value in chosen for part in ("--set", value)]
    stack_env = {**environment(), "REDIS_URL": place.url, **dict.fromkeys(KEY_NAMES, "")}  # no key is asked for
    async with Fleet(run, place.home) as fleet:
        roles = ["worker", "gateway", *(["rollout-server"] if with_server else [])]
        for role in roles:
            await fleet.start(sluice_command(role, *options), stack_env)
        stack = Stack(f"http://127.0.0.1:{gateway}", f"http://127.0.0.1:{server}")
        await until_healthy(session, stack.gateway, fleet)
        if with_server:
            await until_healthy(session, stack.server, fleet)
        await _until_serving(place.url, run, fleet)
        yield stack


async def until_healthy(session: aiohttp.ClientSession, url: str, fleet: Fleet) -> None:
    """Return once /health answers. Raises DeadlineExceeded, or SluiceError when a process has ended."""
    await _until(lambda: is_healthy(session, url), f"{url}/health", fleet)


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on."""
    with contextlib.ExitStack() as scope:
        taken = [scope.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


async def _until_serving(url: str, run: str, fleet: Fleet) -> None:
    client = connect(BrokerConfig(url=url))
    keys = Keys(run)

    async def serves() -> bool:
        return any("running" in row.facts for row in (await snapshot(client, keys)).alive("worker"))

    try:
        await _until(serves, "a worker with its engine", fleet)
    finally:
        await client.aclose()


async def _until(holds: Callable[[], Coroutine[Any, Any, bool]], what: str, fleet: Fleet) -> None:
    until = time.monotonic() + _START_S
    while not await holds():
        fleet.check()
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{what} was not there in {_START_S:.0f} s")
        await asyncio.sleep(_POLL_S)
