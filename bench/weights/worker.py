"""The worker's end, in a process of its own: an engine that follows one run after the other, as a decode worker does.

Times are `time.monotonic` seconds, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch

from sluice.bench.engines import loaded, make_engine
from sluice.bench.processes import Parent
from sluice.bench.weights.links import Timed, carrier, store_of
from sluice.pipeline.config import load_config
from sluice.pipeline.run.role import role_process
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.messages import Progress
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.job_prompts import JobPrompts
from sluice.workers.weights_watch import probe_of


class Work(msgspec.Struct, frozen=True):
    """`serve`: a decode worker that tells each Arrived, until the next line, which it answers with `{}`. `join`: fetch
    and load `version` on a host that has nothing of it, answered with the seconds."""

    part: Literal["serve", "join"]
    settings: list[str]
    mbit_s: int | None = None
    version: int = 0


class Arrived(msgspec.Struct, frozen=True):
    """A version in the engine: when it was noticed, fetched, loaded and proved; its first token, if sequences ran."""

    version: int
    noticed: float
    fetched: float
    loaded: float
    first: float
    sequences: int


async def serve(parent: Parent, name: str, model: str, max_batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    async with loaded(make_engine(name, Path(model), max_batch, dtype="bfloat16")) as backend:
        parent.tell("ready")
        async for work in parent.requests(Work):
            if work.part == "join":
                parent.tell(await _join(backend, work))
                continue
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_follow(backend, work, parent, stop))
                await parent.line()
                stop.set()
            parent.tell({})


async def _follow(backend: Backend, work: Work, parent: Parent, stop: asyncio.Event) -> None:
    config = load_config(None, work.settings)
    async with role_process(config, "worker", "bench-worker", stop) as role:
        prompts = await asyncio.to_thread(JobPrompts, config.model)
        try:
            timed = Timed(carrier(config, store_of(config, work.mbit_s)))
            watched = cast("Backend", Watched(backend, timed, parent))
            await DecodeWorker(role, watched, prompts, timed).run()
        finally:
            await prompts.close()


async def _join(backend: Backend, work: Work) -> float:
    config = load_config(None, work.settings)
    async with role_process(config, "worker", "bench-joiner", asyncio.Event()) as role:
        began = time.monotonic()
        manifest = await WeightsRegistry(role.client, role.keys).get(work.version)
        assert manifest is not None
        probe = probe_of(manifest, backend.facts.dtype, config.weights.probe_tolerance)
        with contextlib.closing(carrier(config, store_of(config, work.mbit_s))) as own:
            directory = await asyncio.to_thread(own.fetch, manifest)
            await backend.load_weights(directory, work.version, probe)
            return time.monotonic() - began


class Watched:
    """A backend that tells what arrives; everything else is the backend's own."""

    def __init__(self, backend: Backend, timed: Timed, parent: Parent) -> None:
        self._backend, self._timed, self._parent = backend, timed, parent
        self._loop = asyncio.get_running_loop()
        self._sequences, self._untold = 0, dict[int, float]()  # version -> when it was loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def load_weights(self, directory: Path, version: int, *rest: Any) -> None:
        self._untold[version] = 0.0
        await self._backend.load_weights(directory, version, *rest)
        self._untold[version] = time.monotonic()
        if not self._sequences:
            self._tell(version, self._untold[version])

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        self._sequences += 1
        try:
            return await self._backend.decode(replace(request, report_every=1, report=self._saw))
        finally:
            self._sequences -= 1

    def _saw(self, so_far: Progress) -> None:
        """In the engine's thread."""
        version = so_far.versions.runs[-1][0]
        if version in self._untold:
            self._loop.call_soon_threadsafe(self._tell, version, time.monotonic())

    def _tell(self, version: int, first: float) -> None:
        loaded_at = self._untold.pop(version, None)
        if loaded_at is not None:
            timed = self._timed
            at = loaded_at or first  # the first token may come before the call returns
            self._parent.tell(Arrived(version, timed.began, timed.ended, at, max(at, first), self._sequences))
