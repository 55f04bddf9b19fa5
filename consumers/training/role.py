"""The composition root of the trainer process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import torch

from consumers.tasks.codec import HFTextCodec
from consumers.training.distributed import Shard, sharding
from consumers.training.model import load_policy
from consumers.training.step import TrainStep
from consumers.training.trackers import Trackers
from consumers.training.trainer import Trainer
from pipeline.broker.ownership import Ownership
from pipeline.config.rules import policy_warnings
from pipeline.config.types import Config
from pipeline.logs import get_logger
from pipeline.run import provenance
from pipeline.run.gpu import use_free_gpu
from pipeline.run.role import default_name, role_process
from pipeline.status.snapshot import snapshot


async def train(config: Config) -> None:
    """Run the trainer to the end of the run."""
    with use_free_gpu(wanted=config.trainer.claim_gpu), sharding(config.model) as shard:
        await _train(config, shard)


async def _train(config: Config, shard: Shard | None) -> None:
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.trainer.torch_threads)
    source = Path(config.model.path)
    trackers = Trackers(config)  # here already: one that is not installed is no reason to load a model
    async with role_process(config, "trainer", default_name("trainer")) as role, trackers:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(deadline_s=60, waiting=role.status.waiting)
        role.spawn(owner.keep())
        provenance.store(config, Path(config.run_dir) / config.run)
        role.status.waiting(f"the model to load from {source}")
        model = await asyncio.to_thread(load_policy, source, config.model, dropout=config.trainer.dropout)
        codec = HFTextCodec(source)
        pad_id = codec.eos_token_ids[0] if codec.eos_token_ids else 0
        step = TrainStep(
            model,
            config.trainer,
            pad_id=pad_id,
            row_tokens=config.consumer.row_tokens,
            coord_ids=codec.coord_token_ids,
            policy=config.policy,
        )
        if shard is not None:
            await asyncio.to_thread(shard, step.model, step.optimizer)
        role.status.waiting("the proof of the forward pass")
        await asyncio.to_thread(step.prove)
        for warning in policy_warnings(config):
            get_logger().warning("policy loss", known=warning)
        await Trainer(role, owner, step, source, trackers).run()
        if (await snapshot(role.client, role.keys)).complete:
            await cast("Awaitable[bool]", role.client.set(role.keys.state, "finished"))
        await owner.release()
