"""The health record that `arq --check` reads."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

from arq.connections import ArqRedis, RedisSettings
from arq.worker import async_check_health, check_health, func

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.wire.keys import Keys
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, serving
from tests.roles import eventually


async def nothing(ctx: dict[Any, Any]) -> None:
    pass


NOTHING = func(nothing, name="nothing")


async def test_the_check_fails_without_a_worker_and_passes_with_one(
    broker_config: BrokerConfig, make_worker: MakeWorker, keys: Keys
) -> None:
    settings = RedisSettings.from_dsn(broker_config.url or "")

    async def healthy() -> bool:
        return await async_check_health(settings, queue_name=keys.jobs) == 0

    assert not await healthy()
    worker = make_worker(NOTHING)
    async with serving(worker):
        await eventually(healthy, "a health record")
    await worker.close()
    assert not await healthy(), "a worker that ended takes its record along"


def test_the_check_of_arqs_command(broker_config: BrokerConfig, keys: Keys) -> None:
    settings = {"redis_settings": RedisSettings.from_dsn(broker_config.url or ""), "queue_name": keys.jobs}
    assert check_health(settings) == 1


async def test_a_burst_leaves_a_record(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    await foreign.enqueue_job("nothing")
    await burst(make_worker(NOTHING))
    assert await foreign.exists(f"{keys.jobs}:health-check") == 1


async def test_the_key_and_the_interval_are_the_users(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    key = f"{keys.run}:my-health"
    worker = make_worker(NOTHING, health_check_key=key, health_check_interval=0.5)
    async with serving(worker):

        async def there() -> bool:
            return bool(await foreign.exists(key))

        await eventually(there, "a health record under its own key")
        left: list[int] = []

        async def renewed() -> bool:
            left.append(await foreign.pttl(key))
            assert left[-1] <= 1500
            return any(0 < earlier < later for earlier, later in pairwise(left))

        await eventually(renewed, "it to be renewed before it runs out")
    await worker.close()
    assert not await there()


async def test_the_record_says_what_was_done_and_what_runs(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    go = asyncio.Event()

    async def wait(ctx: dict[Any, Any]) -> None:
        await go.wait()

    async def breaks(ctx: dict[Any, Any]) -> None:
        raise ValueError

    worker = make_worker(NOTHING, func(wait, name="wait"), func(breaks, name="breaks"), health_check_interval=0)
    async with serving(worker):
        await answer(await foreign.enqueue_job("nothing"))
        waiting = await foreign.enqueue_job("wait")
        await foreign.enqueue_job("breaks")
        await foreign.enqueue_job("wait", _defer_by=60)

        now: dict[str, str] = {}

        async def done() -> bool:
            text = (await foreign.get(f"{keys.jobs}:health-check") or b"").decode()
            now.update(re.findall(r"(\w+)=(\d+)", text))
            return (now.get("j_complete"), now.get("j_failed"), now.get("j_ongoing")) == ("1", "1", "1")

        await eventually(done, "the record to count what ended, and what runs")
        go.set()
        await answer(waiting)
    assert (now["j_retried"], now["queued"]) == ("0", "2")
