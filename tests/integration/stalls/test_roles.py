"""Stalls of processes, with real roles: nobody there, dead ones, failed ones, a guard that is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.training.trainer import Trainer
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, RepeatTerminateConfig
from sluice.pipeline.errors import GuardImpossible, MessageError, first_cause
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.wire.keys import Keys
from sluice.producers.submit import produce
from sluice.workers.role import work
from tests.integration.stalls.looking import config_of, consuming, stalled, why
from tests.loop_models import without_end
from tests.roles import role_of
from tests.tiny_models import save_tiny_model
from tests.trainers import train_step


async def test_no_process(broker_config: BrokerConfig, keys: Keys, tmp_path: Path) -> None:
    config = config_of(broker_config, keys, tmp_path, 3)
    assert (await why(config)).verdict.state == "idle"
    await produce(config)
    look, stall = await stalled(config, "no_process")
    assert stall_text(look.now, stall).says == "no process is alive, 3 sequences are in flight"
    assert look.verdict.state == "stalled"
    assert len(look.now.stalls) == 1


async def test_no_worker(broker_config: BrokerConfig, keys: Keys, tmp_path: Path) -> None:
    config = config_of(broker_config, keys, tmp_path, 3)
    began = time.time()
    async with consuming(config):
        await produce(config)
        look, stall = await stalled(config, "no_worker")
    assert stall_text(look.now, stall).says == "no worker is alive, and 3 jobs wait"
    assert stall.since is not None
    assert began - 1 < stall.since < time.time() + 1
    assert "sluice worker" in stall_text(look.now, stall).remedy
    assert (look.verdict.state, look.verdict.moved) == ("stalled", {})


async def test_a_dead_trainer_is_known_by_its_last_words(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, source: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, 2)
    await client.xadd(keys.batches, {"b": b"rubbish"})
    await client.hset(keys.counts, mapping={"enqueued": 2, "accepted": 2})
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the scope raises, not one line of it
        async with role_of(config, "trainer", "trainer") as role:
            owner = Ownership(role.client, role.keys, "trainer")
            await owner.acquire(10, role.status.waiting)
            await Trainer(role, owner, train_step(source), source).run()
    assert isinstance(first_cause(caught.value), MessageError)
    async with consuming(config):
        look, dead = await stalled(config, "trainer_dead")
        assert stall_text(look.now, dead).says.startswith("no trainer is alive, and 1 batch waits; trainer failed ")
        [failed] = [stall for stall in look.now.stalls if stall.kind == "process_failed"]
        assert stall_text(look.now, failed).says == f"trainer failed: {first_cause(caught.value)}"
        assert failed.since == dead.since == next(row.ended_at for row in look.now.processes if row.role == "trainer")
        assert (failed.blocks, look.verdict.state) == (True, "stalled")
        async with role_of(config, "trainer", "trainer") as again:  # its successor overwrites the row
            await again.status.beat()
            kinds = {stall.kind for stall in (await why(config)).now.stalls}
    assert not kinds & {"trainer_dead", "process_failed", "no_trainer"}


async def test_a_guard_that_cannot_be_active(broker_config: BrokerConfig, keys: Keys, tmp_path: Path) -> None:
    """A worker that ends in its start says why to whoever asks afterwards."""
    model = without_end(save_tiny_model(tmp_path / "model"))
    guard = RepeatTerminateConfig(enabled=True, min_new_tokens=4, max_consecutive_token_repeats=8)
    matching = {"task": "exact_answer", "repeat_terminate": guard}
    config = config_of(broker_config, keys, tmp_path, 2, model={"path": str(model)}, rollout_matching=matching)
    async with consuming(config):
        await produce(config)
        with pytest.raises(ExceptionGroup) as caught:
            await work(config, asyncio.Event())
        assert isinstance(first_cause(caught.value), GuardImpossible)
        look, stall = await stalled(config, "guard_refused")
    assert "refused to start" in stall_text(look.now, stall).says
    assert "end-of-sequence id to force" in stall_text(look.now, stall).says
    assert "rollout_matching.repeat_terminate" in stall_text(look.now, stall).remedy
    assert {stall.kind for stall in look.now.stalls} == {"guard_refused", "no_worker"}
    assert look.verdict.state == "stalled"
