"""A whole small run inside this process: every role works on a real broker and is scraped over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from sluice.consumers.loop import Consumer
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.run.role import Role
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.producers.agents.server import serve_until
from sluice.producers.gateway.server import run_gateway
from sluice.workers.engine.hf import HfBackend
from sluice.workers.scorer.scorer import serve_scores
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.factories import decode_job
from tests.roles import eventually, role_of, run_config
from tests.trainers import train_step

JOBS = 4
_TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)


class Scraped:
    """Pages by role; `own` are those at the servers' own addresses; `now` is a close look while a worker was alive."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.own: dict[str, str] = {}
        self.now: Snapshot | None = None


async def get(address: str, path: str = "/metrics") -> str:
    """The text of a page."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}{path}") as answer:
        assert answer.status == 200, answer.status
        return await answer.text()


def scraped_run(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Scraped:
    """Jobs decoded, consumed and trained; one page of each role."""
    with started(source, max_batch=4) as backend:
        return asyncio.run(_run(broker, keys, run_dir, source, backend))


async def _run(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, backend: HfBackend) -> Scraped:
    config = run_config(
        broker,
        keys,
        run_dir,
        producer={"samples_per_version": JOBS, "max_in_flight": 64},
        model={"path": str(source), "device": "cpu"},
        worker={"max_batch": 4, "poll_s": 0.01},
        trainer={"batch_wait_s": 20.0},
        rollout_matching={"task": "exact_answer"},
        policy=PolicyConfig(enabled=True),
    )
    found, client = Scraped(), connect(broker)
    try:
        await _decoded(config, backend, client, keys, found)
        await _consumed(config, source, client, keys, found)
        await _trained(config, source, found)
        await _scorer(config, client, keys, found)
        async with role_of(config, "producer", "p") as role:
            found.pages["producer"] = await get(role.status.row.facts["metrics"])
        await _gateway(config, found)
        await _rollout_server(config, found)
    finally:
        await client.aclose()
    return found


async def _decoded(config: Config, backend: HfBackend, client: Any, keys: Keys, found: Scraped) -> None:
    jobs = [decode_job(f"{keys.run}:{number}", task="exact_answer", truth="seven") for number in range(JOBS)]
    assert set(await JobQueue(client, keys).enqueue(jobs, Credit(100, 10**9, 10))) == {"enqueued"}

    async def over() -> bool:
        return (await snapshot(client, keys)).committed == JOBS

    async def said() -> bool:
        rows = (await snapshot(client, keys)).processes
        return any(row.facts.get("sequences") == JOBS for row in rows)

    async with working(config, backend):
        await eventually(over, "the sequences to end")
        await eventually(said, "the heartbeat that says so")
        found.now = await inspect(client, keys, config.consumer.count)
        (row,) = found.now.processes
        found.pages["worker"] = await get(row.facts["metrics"])


@contextlib.asynccontextmanager
async def _owning(config: Config, role: str, key: str) -> AsyncIterator[tuple[Role, Ownership]]:
    async with role_of(config, role, role) as made:
        owner = Ownership(made.client, made.keys, key)
        await owner.acquire(10, made.status.waiting)
        yield made, owner
        await owner.release()


async def _consumed(config: Config, source: Path, client: Any, keys: Keys, found: Scraped) -> None:
    async def handed_on() -> bool:
        return (await snapshot(client, keys)).accepted == JOBS

    context = TaskContext(HFTextCodec(source), RolloutMatchingConfig(task="exact_answer"), policy=config.policy)
    async with _owning(config, "consumer", "consumer:0") as (role, owner):
        running = asyncio.create_task(Consumer(role, 0, owner, _TASK, context).run())
        await eventually(handed_on, "a batch to be handed on")
        role.stop.set()
        await running
        found.pages["consumer"] = await get(role.status.row.facts["metrics"])
    await client.hset(keys.source, "exhausted", 1)


async def _trained(config: Config, source: Path, found: Scraped) -> None:
    async with _owning(config, "trainer", "trainer") as (role, owner):
        step = train_step(source, learning_rate=1e-3, policy=config.policy)
        await Trainer(role, owner, step, source).run()
        found.pages["trainer"] = await get(role.status.row.facts["metrics"])


async def _scorer(config: Config, client: Any, keys: Keys, found: Scraped) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(serve_scores(config, stop))

    async def ready() -> bool:
        rows = [row for row in (await snapshot(client, keys)).processes if row.role == "scorer"]
        return any((row.waiting_for or "").startswith("score jobs") for row in rows)

    await eventually(ready, "the scorer's model")
    (address,) = [r.facts["metrics"] for r in (await snapshot(client, keys)).processes if r.role == "scorer"]
    found.pages["scorer"] = await get(address)
    stop.set()
    await running


async def _gateway(config: Config, found: Scraped) -> None:
    async with role_of(config, "gateway", "g") as role:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(run_gateway(role, 0, ready.set_result))
        async with asyncio.timeout(HANG_S):
            port = await ready
        found.own["gateway"] = await get(f"127.0.0.1:{port}")
        found.pages["gateway"] = await get(role.status.row.facts["metrics"])
        role.stop.set()
        await running


async def _rollout_server(config: Config, found: Scraped) -> None:
    drain, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = taken.getsockname()[1]
    config = replace(config, metrics=replace(config.metrics, port=chosen))
    running = asyncio.create_task(serve_until(config, drain, port=0, on_ready=ready.set_result))
    async with asyncio.timeout(HANG_S):
        port = await ready
    found.own["rollout-server"] = await get(f"127.0.0.1:{port}")
    found.pages["rollout-server"] = await get(f"127.0.0.1:{chosen}")
    drain.set()
    await running
