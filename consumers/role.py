"""The composition root of a consumer process."""

from __future__ import annotations

from pathlib import Path

from consumers.codec import HFTextCodec
from consumers.loop import Consumer
from consumers.task import TaskContext
from consumers.tasks import check_options, load_task
from pipeline.config.types import Config
from pipeline.errors import ConfigError
from pipeline.lifecycle import default_name, role_process
from pipeline.ownership import Ownership


async def consume(config: Config, partition: int) -> None:
    """Run one partition's consumer."""
    if not 0 <= partition < config.consumer.count:
        raise ConfigError(
            f"--partition {partition}: consumer.count is {config.consumer.count}; give 0 to count-1"
        )
    task = load_task(config.rollout_matching)
    codec = HFTextCodec(Path(config.model.path))
    context = TaskContext(codec=codec, options=config.rollout_matching, seed=config.seed)
    check_options(task, context)
    async with role_process(config, "consumer", default_name(f"consumer-{partition}")) as role:
        owner = Ownership(role.client, role.keys, f"consumer:{partition}")
        await owner.acquire(deadline_s=60, waiting=role.status.waiting)
        role.spawn(owner.keep())
        await Consumer(role, partition, owner, task, context).run()
        await owner.release()
