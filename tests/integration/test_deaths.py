"""What a supervisor leaves of a child that failed: its last words, and no leases."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import EngineError
from sluice.pipeline.run.stack import Deaths
from sluice.pipeline.run.supervisor import Child
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from tests.roles import run_config


@pytest.mark.parametrize("spoke", [True, False])
async def test_a_row_with_last_words_stays_and_another_goes(
    client: Redis, keys: Keys, broker_config: BrokerConfig, tmp_path: Path, spoke: bool
) -> None:
    reporter = StatusReporter(client, keys, "worker", "worker-0")
    await reporter.beat()
    if spoke:
        await reporter.last_words(EngineError("the engine did not start"))
    deaths = Deaths(client, run_config(broker_config, keys, tmp_path))
    await deaths.settle(Child("worker-0", [], tmp_path / "log"), reporter.row.pid)
    rows = (await snapshot(client, keys)).processes
    assert [row.error for row in rows] == (["the engine did not start"] if spoke else [])
