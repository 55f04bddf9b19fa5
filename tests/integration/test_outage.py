"""A broker that is killed and comes back: commands wait for it, longer outages end with a named error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline import broker
from pipeline.config.types import BrokerConfig
from tests.killable_broker import KillableBroker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KillableBroker]:
    server = KillableBroker(tmp_path)
    yield server
    server.kill()


async def test_commands_outlast_an_outage_and_a_start_that_is_late(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=60)
    client: Any = broker.connect(config)
    early = asyncio.create_task(client.set("a", 1))
    await asyncio.sleep(0.2)
    assert not early.done()
    server.start()
    assert await early
    server.kill()
    waiting = [asyncio.create_task(client.incr("n")) for _ in range(3)]
    pipe = client.pipeline(transaction=False)
    pipe.get("a")
    waiting.append(asyncio.create_task(pipe.execute()))
    script = asyncio.create_task(broker.Scripts(client).run("disown", ["k"], ["nonce"]))
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in [*waiting, script])
    server.start()
    await asyncio.gather(*waiting, script)
    await client.aclose()


async def test_an_outage_that_is_too_long_ends_in_an_error_in_time(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=0.3)
    client: Any = broker.connect(config)
    with pytest.raises((redis.ConnectionError, OSError)):
        await asyncio.wait_for(client.get("a"), 30)
    await client.aclose()
