"""The composition root of a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.images.store import images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import Claim
from sluice.pipeline.run.role import Role, default_name, role_process, use_free_gpus
from sluice.pipeline.wire.messages import DecodeJob, SequenceResult
from sluice.pipeline.wire.waits import WaitKind
from sluice.workers.engine import import_engines
from sluice.workers.engine.contracts import EngineFacts
from sluice.workers.model_files import check_directory


async def work(config: Config, stop: asyncio.Event | None = None) -> None:
    """Run a decode worker until it is asked to stop, by a signal or by the given event."""
    if config.worker.runs:
        from sluice.workers.fleet import work_for_all

        await work_for_all(config, stop)
        return
    check_directory(config.model.path)
    with contextlib.ExitStack() as gpu:  # released last: the process holds GPU memory until the end
        async with role_process(config, "worker", default_name("worker"), stop) as role:
            gpu.enter_context(use_free_gpus(wanted=config.worker.claim_gpu, count=config.worker.gpus))
            role.status.waiting(WaitKind.ENGINE, config.model.path)
            await serve(role)


async def serve(role: Role) -> None:
    """Load the engine and serve the queue."""
    await import_engines(role.config.worker)
    from sluice.workers.decode_worker import DecodeWorker
    from sluice.workers.engine.backends import make_backend
    from sluice.workers.job_prompts import JobPrompts
    from sluice.workers.weights_watch import load_adapters, room_of

    role.start.ended("import")
    config = role.config
    guard = config.rollout_matching.repeat_terminate
    _warn_of_a_late_guard(config)
    # A deterministic run swaps while nothing runs, and needs one module whose tensors stay where they are.
    second_copy_gb = 0.0 if config.deterministic else config.weights.second_copy_gb
    worker = msgspec.structs.replace(config.worker, prefix_cache_mb=0) if config.deterministic else config.worker
    backend = make_backend(
        config.model,
        worker,
        guard,
        config.images,
        room_of(config),
        second_copy_gb=second_copy_gb,
        max_pause_s=config.weights.max_pause_s,
        keep_cache=config.weights.keep_cache,
    )
    await backend.start()
    role.start.ended("load")
    try:
        get_logger().info("engine ready", **_facts(backend.facts))
        await load_adapters(config, backend)
        prompts = await asyncio.to_thread(
            partial(JobPrompts, config.model, images_of_run(config), timeout_s=config.worker.stall_timeout_s)
        )
        role.start.ended("prompts")
        role.status.waiting(None)
        try:
            await DecodeWorker(role, backend, prompts).run()
        finally:
            await prompts.close()
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def worker_without_queue(
    config: Config,
) -> AsyncGenerator[Callable[[DecodeJob], Awaitable[list[SequenceResult]]]]:
    """Decodes jobs in this process, with a worker's own code; the entry point `sluice.engines: jobs`.

    A call returns the results of one job in index order; it raises RequestError for a prompt that can't be decoded.
    Raises ModelError, EngineError.
    """
    from sluice.workers.decode_worker import request_for, result_of
    from sluice.workers.engine.backends import make_backend
    from sluice.workers.job_prompts import JobPrompts

    backend = make_backend(config.model, config.worker, config.rollout_matching.repeat_terminate, config.images)

    async def decode(job: DecodeJob) -> list[SequenceResult]:
        facts, prompt = backend.facts, await prompts.make(job, backend.facts)
        claim = Claim(job_id=job.job_id, attempt=1, enqueued_at=time.time(), job=job)

        async def one(index: int) -> SequenceResult:
            request = request_for(claim, job, prompt, index, seed=config.seed, every=0, on_progress=lambda *_: None)
            output = await backend.decode(request)
            return result_of(claim, job, request, output, facts=facts, worker="here", truncated=prompt.truncated)

        return list(await asyncio.gather(*map(one, range(job.n))))

    try:
        await backend.start()
        prompts = await asyncio.to_thread(
            partial(JobPrompts, config.model, images_of_run(config), timeout_s=config.worker.stall_timeout_s)
        )
        try:
            yield decode
        finally:
            await prompts.close()
    finally:
        await backend.close()


def _warn_of_a_late_guard(config: Config) -> None:
    guard, limit = config.rollout_matching.repeat_terminate, config.sampling.max_new_tokens
    if guard.enabled and guard.min_new_tokens >= limit:
        get_logger().warning(
            "the repeat guard can never fire: min_new_tokens is not below max_new_tokens",
            min_new_tokens=guard.min_new_tokens,
            max_new_tokens=limit,
        )


def _facts(facts: EngineFacts) -> dict[str, object]:
    """For the log: collections as text."""
    shown: dict[str, object] = {}
    for name in facts.__dataclass_fields__:
        value = getattr(facts, name)
        shown[name] = ",".join(map(str, sorted(value))) if isinstance(value, tuple | frozenset) else value
    return shown
