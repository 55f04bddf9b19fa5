"""The composition root of a scorer process."""

from __future__ import annotations

import asyncio

from pipeline import logs
from pipeline.config.types import Config
from pipeline.logs import get_logger
from pipeline.run.gpu import use_free_gpu
from pipeline.run.role import default_name, role_process


async def serve_scores(config: Config, stop: asyncio.Event | None = None) -> None:
    """Answer score jobs until asked to stop, by a signal or by the given event; nothing to do without a policy loss."""
    name = default_name("scorer")
    if not config.policy.enabled:
        logs.configure(name)
        get_logger().info("no scores are ever asked for: policy.enabled is false; this scorer ends")
        return
    with use_free_gpu(wanted=config.scorer.claim_gpu):
        await _serve(config, name, stop)


async def _serve(config: Config, name: str, stop: asyncio.Event | None) -> None:
    async with role_process(config, "scorer", name, stop) as role:
        role.status.waiting(f"the model to load from {config.model.path}")
        from workers.score.scorer import Scorer  # torch: after the GPU was chosen
        from workers.score.versioned import VersionedModel

        model = await asyncio.to_thread(VersionedModel, config)
        get_logger().info("scorer ready", device=model.facts.device, dtype=model.facts.dtype)
        await Scorer(role, model).run()
