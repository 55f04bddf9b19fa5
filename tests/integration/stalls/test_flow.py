"""Stalls of the flow, with real roles: old weights, credit that is used up, results that pile up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.tasks.task import Task
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.submit import produce
from sluice.workers.engine.hf import HfBackend
from tests.decode_workers import working
from tests.integration.stalls.looking import TASK, HeldMatch, config_of, consuming, put_result, stalled
from tests.roles import eventually, role_of


async def test_every_worker_on_an_old_version(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, source: Path, engine: HfBackend
) -> None:
    """Here because the worker refused the new one: its files are not those that were registered."""
    config = config_of(broker_config, keys, tmp_path, 2, model={"path": str(source)}, worker={"poll_s": 0.01})
    owner = Ownership(client, keys, "trainer")
    assert await owner.try_acquire()
    made = write_version(source, tmp_path / "weights", WeightVersion(version=1, path="", digest=""))
    torn = replace(made, digest="0" * 64, published_at=time.time() - 30)
    async with working(config, engine, "worker-0"):
        await WeightsRegistry(client, keys).register(torn, owner.key, owner.nonce)

        async def refused() -> bool:
            look, stall = await stalled(config, "old_versions")
            return "refused" in stall_text(look.now, stall).says

        await eventually(refused, "the worker to refuse the version")
        look, stall = await stalled(config, "old_versions")
    assert stall_text(look.now, stall).says.startswith(
        "the one live worker decodes with weights v0 or older, and v1 has been available for "
    )
    assert "worker-0 refused it" in stall_text(look.now, stall).says
    assert stall.since == torn.published_at
    assert stall.blocks
    assert look.now.version_lag == 1


LIMITS = {
    "sequences": ({"max_in_flight": 2}, "(2 of 2 sequences", "held by 2 jobs", "producer.max_in_flight"),
    "versions": (
        {"samples_per_version": 2, "max_staleness": 0},
        "(2 of 64 sequences",
        "2 of at most 2 sequences are enqueued before weights v1",
        "producer.max_staleness",
    ),
    "bytes": ({"max_in_flight_mb": 0}, " of 0 MiB)", "held by 1 job", "producer.max_in_flight_mb"),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_credit_that_is_used_up(limit: str, broker_config: BrokerConfig, keys: Keys, tmp_path: Path) -> None:
    producer, used, held, remedy = LIMITS[limit]
    config = config_of(broker_config, keys, tmp_path, 6, producer=producer)
    running = asyncio.create_task(produce(config))
    try:
        async with role_of(config, "trainer", "trainer") as trainer:
            trainer.status.waiting(WaitKind.BATCHES)
            look, stall = await stalled(config, "credit_exhausted")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    for words in ("the credit is used up", used, held):
        assert words in stall_text(look.now, stall).says
    assert remedy in stall_text(look.now, stall).remedy
    assert not stall.blocks  # the trainer would free it; that nobody decodes is a stall of its own
    assert "no_worker" in {stall.kind for stall in look.now.stalls}


async def test_results_that_pile_up_beside_a_consumer(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, 1)
    held, now = HeldMatch(), time.time()
    await put_result(client, keys, "first", now - 120)
    async with consuming(config, Task(TASK.name, TASK.parse, held, TASK.target)):
        try:

            async def taken() -> bool:
                return (await inspect(client, keys, 1)).lag[0].taken == 1

            await eventually(taken, "the first result to be read")
            for number in range(5):
                await put_result(client, keys, f"more-{number}", now - 60)
            look, stall = await stalled(config, "consumer_lag")
        finally:
            held.go_on.set()
    assert stall_text(look.now, stall).says.startswith("5 results wait unread, the oldest for ")
    assert "1 consumer for 1 partition (consumer-0)" in stall_text(look.now, stall).says
    assert stall.since == pytest.approx(now - 60, abs=2)
    assert look.verdict.state == "stalled"
