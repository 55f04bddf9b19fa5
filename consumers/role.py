"""The composition root of a consumer process."""

from __future__ import annotations

from pathlib import Path

from consumers.codec import HFTextCodec
from consumers.loop import Consumer
from consumers.task import TaskContext
from consumers.tasks import check_options, load_task
from pipeline.broker.ownership import Ownership
from pipeline.config.types import Config
from pipeline.errors import ConfigError
from pipeline.run.role import Role, default_name, role_process


async def consume(config: Config, partition: int | None) -> None:
    """Run one partition's consumer; None takes the first free partition, standing by until there is one."""
    if partition is not None and not 0 <= partition < config.consumer.count:
        raise ConfigError(f"--partition {partition}: consumer.count is {config.consumer.count}; give 0 to count-1")
    task = load_task(config.rollout_matching)
    codec = HFTextCodec(Path(config.model.path))
    context = TaskContext(codec=codec, options=config.rollout_matching, seed=config.seed, policy=config.policy)
    check_options(task, context)
    choices = range(config.consumer.count) if partition is None else [partition]
    async with role_process(config, "consumer", default_name("consumer")) as role:
        held = await _first_free(role, list(choices))
        if held is None:
            return
        number, owner = held
        role.spawn(owner.keep())
        await Consumer(role, number, owner, task, context).run()
        await owner.release()


async def _first_free(role: Role, partitions: list[int]) -> tuple[int, Ownership] | None:
    """The partition that this process now owns; None when asked to stop before one was free."""
    owners = {number: Ownership(role.client, role.keys, f"consumer:{number}") for number in partitions}
    while True:
        for number, owner in owners.items():
            if await owner.try_acquire():
                role.status.waiting(None)
                return number, owner
        role.status.waiting("a partition of results; others hold them all")
        if not await role.nap(0.5):
            return None
