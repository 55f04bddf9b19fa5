"""A program that knows only arq, and workers of ours that serve what it enqueues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from arq.connections import ArqRedis, RedisSettings, create_pool
from redis.asyncio import Redis

from sluice.pipeline.config.types import BrokerConfig, Config, WorkerConfig
from sluice.pipeline.queue import ArqWorker, arq_deserializer, arq_serializer
from sluice.pipeline.wire.keys import Keys

MakeWorker = Callable[..., ArqWorker]


@pytest.fixture
async def foreign(broker_config: BrokerConfig, keys: Keys) -> AsyncIterator[ArqRedis]:
    """arq's own client with our serialiser, on connections of its own."""
    pool = await create_pool(
        replace(RedisSettings.from_dsn(broker_config.url or ""), max_connections=1000),  # 100 by default in redis-py 8
        job_serializer=arq_serializer,
        job_deserializer=arq_deserializer,
        default_queue_name=keys.jobs,
    )
    yield pool
    await pool.aclose(close_connection_pool=True)


@pytest.fixture
def make_worker(broker_config: BrokerConfig, client: Redis, keys: Keys) -> MakeWorker:
    """A burst worker of the test's queue. `settings` are the config's, `on` another run; the rest is arq's."""

    def make(
        *functions: Any, name: str = "w", settings: dict[str, Any] | None = None, on: Keys = keys, **options: Any
    ) -> ArqWorker:
        section = WorkerConfig(**{"poll_s": 0.01, "lease_s": 60.0, "renew_s": 0.1, "drain_s": 60.0, **(settings or {})})
        config = Config(run=on.run, broker=broker_config, worker=section)
        options = {"burst": True, "handle_signals": False, **options}
        return ArqWorker(functions, client=client, keys=on, config=config, name=name, **options)

    return make
