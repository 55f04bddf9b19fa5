"""Two hundred rollouts with tools at a time, through a rollout server, a gateway and a worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config, GatewayConfig, RolloutServerConfig
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.producers.agents.tools.registry import Operation
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.deadlines import RUN_S
from tests.integration.gateway.agents import CALLING, assert_completed, assert_trajectory, rollout_server
from tests.integration.gateway.harness import published, serving
from tests.roles import run_config
from tests.tool_models import tool_model

COUNT = 200
OPERATIONS = ("add", "subtract", "multiply", "divide")


class Together(Operation):
    """A calculator's tool, with its delay; all wait until every rollout uses one, so none may wait for another's."""

    num_calls: int
    all_call: asyncio.Event

    async def call(self, arguments: dict[str, Any]) -> str:
        """The result's digits."""
        Together.num_calls += 1
        if Together.num_calls == COUNT:
            Together.all_call.set()
        await Together.all_call.wait()
        return await super().call(arguments)


TOOLS = [Together(name, RolloutServerConfig().tool_latency_ms) for name in OPERATIONS]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=32) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    return run_config(
        broker_config,
        keys,
        run_dir,
        model={"path": str(source)},
        worker={"poll_s": 0.01, "max_batch": 32},
        gateway=GatewayConfig(request_timeout_s=RUN_S),
        rollout_server=RolloutServerConfig(
            tools=(f"{__name__}:TOOLS",),
            max_concurrent_rollouts=COUNT,
            http_client_timeout_s=RUN_S,
            tool_timeout_s=RUN_S,
            deadline_s=RUN_S,
        ),
    )


async def test_two_hundred_rollouts_at_a_time_stay_apart_and_none_waits_for_anothers_tool(
    config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path
) -> None:
    Together.num_calls, Together.all_call = 0, asyncio.Event()
    asked = {f"r-{at}": one for at, one in zip(range(COUNT), itertools.cycle(CALLING), strict=False)}
    async with serving(config, backend) as gateway, rollout_server(config, gateway.url) as server:
        posts = [server.post("/rollout", name, one.prompt) for name, one in asked.items()]
        for answer, one in zip(await asyncio.gather(*posts), asked.values(), strict=True):
            assert_completed(answer, one)
    codec, results = AutoTokenizer.from_pretrained(source), await published(client, keys)
    assert sorted(result.seq_id for result in results) == sorted(asked), "each is published once"
    for result in results:
        assert_trajectory(result, asked[result.seq_id], codec)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.committed, now.dead, now.dropped, now.queued_jobs) == (COUNT, COUNT, 0, 0, 0)
