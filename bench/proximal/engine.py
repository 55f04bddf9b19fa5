"""One engine in a process of its own, and what it is asked: to measure a part, or to serve a queue.

- It loads and answers Ready; then each line is a Work, answered with the part's fields. While it serves a queue it says
  what it saw, until the next line, which it answers with `{}`.
- From a version's publication to the first token under it: this process publishes, the engine's worker serves a queue.
  The broker is real, and so are the version directories; the worker is in the middle of its sequences each time, and
  the gaps between versions are random, so that every phase of its loop is met.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec

from sluice.bench.broker import enqueue
from sluice.bench.child import Parent
from sluice.bench.engine.sides import PROMPT_IDS
from sluice.bench.models import ENDLESS_CONTEXT
from sluice.bench.processes import START_S, WORK_S, Fleet, enforce_eager, engine_environment
from sluice.bench.proximal.updates import Sizes, score_cost, throughput
from sluice.bench.proximal.valid_share import valid_share
from sluice.bench.proximal.versions import Publisher, Variants
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions, WorkerConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.run.role import role_process
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, Progress, SamplingParams
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.job_prompts import JobPrompts

THREADS = 1
_SEEN_S = 120.0
_GAP_S = (0.3, 1.0)
_JOBS_A_ROW = 16  # far more than are decoded meanwhile


class CostWork(msgspec.Struct, frozen=True, tag="cost"):
    """Measure `score_cost`."""

    sizes: Sizes


class ThroughputWork(msgspec.Struct, frozen=True, tag="throughput"):
    """Measure `throughput`; `home` is a directory for versions."""

    sizes: Sizes
    home: str


class ServeWork(msgspec.Struct, frozen=True, tag="serve"):
    """Serve a queue as a decode worker until the next line; `settings` are `--set` values."""

    settings: list[str]


class ShareWork(msgspec.Struct, frozen=True, tag="share"):
    """Measure `valid_share`; a scorer serves the run of `settings`."""

    sizes: Sizes
    settings: list[str]


Work = CostWork | ThroughputWork | ServeWork | ShareWork


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded, or the worker serves; `version` is that of its weights."""

    version: int


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """The first token under a version: Unix seconds, and how many sequences the engine had then."""

    version: int
    at: float
    sequences: int


class Engine:
    """One that is loaded, in its process. Every call raises SluiceError when it failed, or the process ended."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def measure(self, work: Work) -> dict[str, Any]:
        """The fields of a part."""
        return (await self._fleet.ask(work, dict[str, Any], WORK_S))[0]

    async def published(
        self, client: Any, run: str, settings: list[str], variants: Variants, sizes: Sizes, home: Path
    ) -> dict[str, Any]:
        """Seconds from `published_at` to the first token under the new version, and from its registration."""
        keys = Keys(run)
        await enqueue(JobQueue(client, keys), _long_jobs(run, sizes))
        (ready,) = await self._fleet.ask(ServeWork(settings), Ready, START_S)
        publisher = Publisher(client, keys, home / run / "weights", variants, sizes.retention)
        await publisher.owner.confirm()
        found = await self._publishes(publisher, ready.version, sizes.publishes)
        self._fleet.send("stop")
        while await self._fleet.receive(dict[str, Any], _SEEN_S) != [{}]:
            pass
        return found

    async def _publishes(self, publisher: Publisher, version: int, count: int) -> dict[str, Any]:
        chance = random.Random(0)
        whole, registered, sequences = list[float](), list[float](), list[int]()
        for number in range(count + 1):
            version += 1
            now = await publisher.publish(version)
            (seen,) = await self._fleet.receive(Seen, _SEEN_S)
            if seen.version != version:
                raise SluiceError(f"the worker decodes under v{seen.version} after v{version} was published")
            if number:  # the first one met a worker that had just begun
                whole.append(seen.at - now.published_at)
                registered.append(seen.at - now.registered_at)
                sequences.append(seen.sequences)
            await asyncio.sleep(chance.uniform(*_GAP_S))
        return {
            "median": median(whole),
            "worst": max(whole),
            "from_register": {"median": median(registered), "worst": max(registered)},
            "publishes": len(whole),
            "fewest_sequences": min(sequences),
        }


@contextlib.asynccontextmanager
async def engine(backend: str, model: Path, variants: Path, max_batch: int, logs: Path) -> AsyncIterator[Engine]:
    """Loaded; it ends with the block."""
    async with Fleet(f"engine-{backend}", logs) as fleet:
        await fleet.start_child(serve, [backend, str(model), str(variants), max_batch], engine_environment(THREADS))
        await fleet.receive(Ready, START_S)
        yield Engine(fleet)


def _long_jobs(run: str, sizes: Sizes) -> list[DecodeJob]:
    """Greedy sequences of a third to all of the context."""
    chance = random.Random(1)
    longest = ENDLESS_CONTEXT - sizes.prompt
    return [
        DecodeJob(
            run=run,
            job_id=tagged(run, str(number)),
            prompt_token_ids=TokenArray(chance.randrange(PROMPT_IDS) for _ in range(sizes.prompt)),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=chance.randint(longest // 3, longest)),
        )
        for number in range(sizes.rows * _JOBS_A_ROW)
    ]


async def serve(parent: Parent, name: str, model: str, variants: str, max_batch: int) -> None:
    """The engine's process."""
    options = VllmEngineOptions(enforce_eager=enforce_eager())
    worker = WorkerConfig(
        backend="vllm" if name == "vllm" else "hf", max_batch=max_batch, torch_threads=THREADS, vllm=options
    )
    backend = make_backend(ModelConfig(path=model, dtype="float32"), worker)
    await backend.start()
    parent.tell(Ready(backend.version))
    try:
        async for work in parent.requests(cast("type[Work]", Work)):
            parent.tell(await _do(backend, Variants.read(Path(variants)), work, parent))
    finally:
        await backend.close()


async def _do(backend: Backend, variants: Variants, work: Work, parent: Parent) -> Any:
    match work:
        case CostWork(sizes):
            return await score_cost(backend, variants, sizes)
        case ThroughputWork(sizes, home):
            return await throughput(backend, variants, sizes, Path(home))
        case ShareWork(sizes, settings):
            return await valid_share(backend, variants, sizes, load_config(None, settings))
        case ServeWork(settings):
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(_serve_queue(backend, load_config(None, settings), parent, stop))
                await parent.line()
                stop.set()
                await serving
            return {}


async def _serve_queue(backend: Backend, config: Config, parent: Parent, stop: asyncio.Event) -> None:
    """As a decode worker, until `stop` is set; what is running then goes back to the queue."""
    async with role_process(config, "worker", "bench-worker", stop) as role:
        prompts = await asyncio.to_thread(JobPrompts, config.model)
        try:
            worker = DecodeWorker(role, cast("Backend", Observed(backend, parent.tell)), prompts)
            parent.tell(Ready(backend.version))
            await worker.run()
        finally:
            await prompts.close()


class Observed:
    """A backend that reports the first token under each version; everything else is the backend's own."""

    def __init__(self, backend: Backend, tell: Callable[[Seen], None]) -> None:
        self._backend, self._tell = backend, tell
        self._loop = asyncio.get_running_loop()
        self._newest, self._sequences = backend.version, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """As the backend does it."""
        self._sequences += 1
        try:
            return await self._backend.decode(replace(request, report_every=1, report=self._saw))
        finally:
            self._sequences -= 1

    def _saw(self, so_far: Progress) -> None:
        """In the engine's thread."""
        version = so_far.versions.runs[-1][0]
        if version > self._newest:
            self._newest = version
            self._loop.call_soon_threadsafe(self._tell, Seen(version, time.time(), self._sequences))
