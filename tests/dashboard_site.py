"""A small real run with its dashboard, in a thread of its own: what browsers and HTTP clients look at in tests.

- The worker, the consumer and the dashboard are the real roles; sequences are really decoded by a tiny model, dead
  letters died in the queue, and weight versions are files that were published.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.dashboard.app import make_app, run_dashboard
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.loop import Consumer
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, DashboardConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.run.role import Role
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, WeightVersion
from sluice.workers.engine.hf import HfBackend
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.factories import decode_job
from tests.roles import eventually, role_of, run_config
from tests.served import served

_PLENTY = Credit(10_000, 10_000, 1)
TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)


@dataclass
class Site:
    """A running dashboard and the run that it shows."""

    config: Config
    url: str
    loop: asyncio.AbstractEventLoop
    role: Role
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def do(self, work: Any, deadline_s: float = HANG_S) -> Any:
        """Await a coroutine in the site's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(deadline_s)

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    @property
    def reader(self) -> HistoryReader:
        """The history that the dashboard reads."""
        return HistoryReader(history_directory(self.config))

    @contextlib.contextmanager
    def another(self, key: str | None = None, **dashboard: Any) -> Iterator[int]:
        """A second dashboard of the same run, with a key and settings of its own, and no actions; its port."""
        settings = msgspec.structs.replace(self.config.dashboard, **dashboard)
        monitor = Monitor(msgspec.structs.replace(self.config, dashboard=settings), self.role.client, self.reader)
        entered, stop = Future[int](), asyncio.Event()

        async def serve() -> None:
            watching = asyncio.create_task(monitor.run())
            async with served(make_app(monitor, key), grace_s=1) as server:
                entered.set_result(server.port)
                await stop.wait()
                monitor.close()
            watching.cancel()

        serving = asyncio.run_coroutine_threadsafe(serve(), self.loop)
        try:
            yield entered.result(HANG_S)
        finally:
            self.loop.call_soon_threadsafe(stop.set)
            serving.result(HANG_S)

    async def dead(self) -> int:
        """Dead letters now."""
        return (await snapshot(self.role.client, self.role.keys)).dead_letters

    async def die(self, name: str, n: int = 1) -> None:
        """A job that no engine can serve, enqueued and dead."""
        before = await self.dead()
        job = decode_job(self.job_id(name), n=n, sampling=SamplingParams(max_new_tokens=100_000), task="exact_answer")
        assert await JobQueue(self.role.client, self.role.keys).enqueue([job], _PLENTY) == ["enqueued"]

        async def holds() -> bool:
            return await self.dead() >= before + n

        await eventually(holds, f"{name} to die")

    def job_id(self, name: str) -> str:
        """The id of a job of this run."""
        return f"{self.config.run}:{name}"


def site_config(broker: BrokerConfig, directory: Path, model: Path, run: str) -> Config:
    """Tiny batches, quick leases, any free port."""
    return run_config(
        broker,
        Keys(run),
        directory / "runs",
        model={"path": str(model), "device": "cpu"},
        worker={"lease_s": 5.0, "renew_s": 0.5, "poll_s": 0.02, "max_batch": 8, "drain_s": 10.0},
        producer={"samples_per_version": 4, "max_in_flight": 1000},
        rollout_matching={"task": "exact_answer"},
        dashboard=DashboardConfig(port=0),
    )


def jobs_of(run: str, count: int = 8) -> list[DecodeJob]:
    """Groups of two, and one request that no engine can serve."""
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=7)
    good = [
        decode_job(
            f"{run}:row-{number}",
            n=2,
            messages=[{"role": "user", "content": f"What is {number} + {number}?"}],
            sampling=sampling,
            truth=str(2 * number),
            task="exact_answer",
        )
        for number in range(count)
    ]
    too_long = SamplingParams(max_new_tokens=100_000)
    return [*good, decode_job(f"{run}:too-long", n=2, sampling=too_long, task="exact_answer")]


@contextlib.contextmanager
def dashboard_site(
    config: Config, *, jobs: Sequence[DecodeJob], key: str | None = None, allow_actions: bool = True
) -> Iterator[Site]:
    """Serve until the block ends; what went wrong is raised here."""
    ready: Future[Site] = Future()
    thread = threading.Thread(target=_thread, args=(config, jobs, key, allow_actions, ready))
    thread.start()
    site = ready.result(HANG_S)
    try:
        yield site
    finally:
        site.loop.call_soon_threadsafe(site.stop.set)
        thread.join(HANG_S)
        assert not thread.is_alive(), "the site did not stop"


def _thread(config: Config, jobs: Sequence[DecodeJob], key: str | None, allow: bool, ready: Future[Site]) -> None:
    try:
        asyncio.run(_live(config, jobs, key, allow, ready))
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def _live(config: Config, jobs: Sequence[DecodeJob], key: str | None, allow: bool, ready: Future[Site]) -> None:
    backend = HfBackend(config.model, max_batch=config.worker.max_batch)
    await backend.start()
    try:
        async with role_of(config, "dashboard", "dashboard") as role:
            await _publish(role, Path(config.model.path))
            await _enqueue(role, jobs)
            async with working(config, backend, "worker-0"), _consuming(config):
                await _settled(role, sum(job.n for job in jobs) + 1)
                site = Site(config, "", asyncio.get_running_loop(), role)
                serving = asyncio.create_task(_serve(site, key, allow, ready))
                await asyncio.wait([serving, asyncio.ensure_future(site.stop.wait())], return_when="FIRST_COMPLETED")
                role.stop.set()
                await serving
    finally:
        await backend.close()


async def _serve(site: Site, key: str | None, allow: bool, ready: Future[Site]) -> None:
    def tell(port: int) -> None:
        site.url = f"http://127.0.0.1:{port}"
        ready.set_result(site)

    await run_dashboard(site.role, key, allow_actions=allow, on_ready=tell)


async def _publish(role: Role, model: Path) -> None:
    """Versions 0 and 1 of the same weights."""
    owner = Ownership(role.client, role.keys, "trainer")
    assert await owner.try_acquire()
    registry = WeightsRegistry(role.client, role.keys)
    root = Path(role.config.run_dir) / role.config.run / "weights"
    for version in (0, 1):
        manifest = WeightVersion(version=version, path="", digest="", step=version, published_at=1.8e9 + version)
        full = write_version(model, root, manifest)
        full = msgspec.structs.replace(full, probe_score=-12.5 - version)
        await registry.register(full, owner.key, owner.nonce)
    await owner.release()


async def _enqueue(role: Role, jobs: Sequence[DecodeJob]) -> None:
    assert set(await JobQueue(role.client, role.keys).enqueue(list(jobs), _PLENTY)) == {"enqueued"}
    junk = f"{role.keys.run}:junk<b>&"
    await role.client.set(ARQ_JOB + junk, b"junk")
    await role.client.zadd(role.keys.jobs, {junk: 1})


@contextlib.asynccontextmanager
async def _consuming(config: Config) -> AsyncIterator[None]:
    codec = HFTextCodec(Path(config.model.path))
    context = TaskContext(codec, config.rollout_matching)
    async with role_of(config, "consumer", "consumer-0") as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        assert await owner.try_acquire()
        role.spawn(owner.keep())
        running = asyncio.create_task(Consumer(role, 0, owner, TASK, context).run())
        try:
            yield
        finally:
            role.stop.set()
            await running
            await owner.release()


async def _settled(role: Role, count: int) -> None:
    async def holds() -> bool:
        now = await snapshot(role.client, role.keys)
        return now.accepted + now.dead + now.dropped >= count

    await eventually(holds, f"{count} sequences to be handed on, dead or dropped", HANG_S)
