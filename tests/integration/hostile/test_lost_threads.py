"""A rendering or a tool that never ends: its caller is told at its deadline, and its thread is seen from outside."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.status.heartbeat import Heartbeat, StatusReporter, read_row
from sluice.pipeline.thread_pool import ThreadPool, lost_threads
from tests.integration.gateway.harness import serving
from tests.integration.rollout.conftest import Serve


@pytest.fixture
async def lost() -> AsyncIterator[int]:
    """One more than the process had."""
    pool, gate = ThreadPool("render", 1), threading.Event()
    with pytest.raises(DeadlineExceeded):
        await pool.run(gate.wait, timeout_s=0.02, what="the prompt")
    yield lost_threads()
    gate.set()


async def test_it_is_in_health_and_metrics_of_the_rollout_server(serve: Serve, lost: int) -> None:
    async with serve() as server:
        _, health = await server.get("/health")
        assert health["lost_threads"] == lost > 0
        assert await server.metric('sluice_lost_threads{role="rollout-server"}') == lost


async def test_it_is_in_health_and_metrics_of_the_gateway(config: Config, lost: int) -> None:
    async with serving(config, None) as gateway:
        async with gateway.http.get(gateway.url + "/health") as answer:
            assert (await answer.json())["lost_threads"] == lost > 0
        async with gateway.http.get(gateway.url + "/metrics") as answer:
            assert f'sluice_lost_threads{{role="gateway"}} {float(lost)}' in (await answer.text()).splitlines()


async def test_it_is_in_the_heartbeat(client: Any, keys: Any, lost: int) -> None:
    await StatusReporter(client, keys, "worker", "w").beat()
    row = read_row(await client.hget(keys.processes, "w"), Heartbeat)
    assert row.facts["lost_threads"] == lost > 0
