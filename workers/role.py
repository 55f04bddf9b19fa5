"""The composition root of a worker process."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from sluice.pipeline.config.types import Config
from sluice.pipeline.images.writer import images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.gpu import use_free_gpu
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.wire.waits import WaitKind
from sluice.workers.engine.contracts import EngineFacts


async def work(config: Config, stop: asyncio.Event | None = None) -> None:
    """Run a decode worker until it is asked to stop, by a signal or by the given event."""
    with contextlib.ExitStack() as gpu:  # released last: the process holds GPU memory until the end
        async with role_process(config, "worker", default_name("worker"), stop) as role:
            gpu.enter_context(use_free_gpu(wanted=config.worker.claim_gpu))
            role.status.waiting(WaitKind.ENGINE, config.model.path)
            await serve(role)


async def serve(role: Role) -> None:
    """Load the engine and serve the queue."""
    from sluice.workers.decode_worker import DecodeWorker
    from sluice.workers.engine.backends import make_backend
    from sluice.workers.job_prompts import JobPrompts

    config = role.config
    guard = config.rollout_matching.repeat_terminate
    _warn_of_a_late_guard(config)
    backend = make_backend(config.model, config.worker, guard, config.images)
    await backend.start()
    try:
        get_logger().info("engine ready", **_facts(backend.facts))
        prompts = await asyncio.to_thread(
            partial(JobPrompts, config.model, images_of_run(config), timeout_s=config.worker.stall_timeout_s)
        )
        role.status.waiting(None)
        try:
            await DecodeWorker(role, backend, prompts).run()
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
