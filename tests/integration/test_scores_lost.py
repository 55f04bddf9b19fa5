"""Score jobs on a broker that goes away and loses things."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.pipeline.broker.connection import connect, wait_ready
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.wire.keys import SCORE_GROUP, Keys
from tests.deadlines import HANG_S, RUN_S
from tests.killable_broker import KillableBroker
from tests.roles import eventually
from tests.score_jobs import LONG_S, all_of, job, names, nothing_is_left, put, scored, scorer, serve


@pytest.fixture(scope="module")
def broker_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerConfig]:
    """Of these tests alone: they count the server's commands."""
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path_factory.mktemp("own")))) as url:
        yield BrokerConfig(url=url)


async def test_an_answer_list_that_lost_its_end_is_read_again(client: Any, keys: Keys) -> None:
    asking = asyncio.create_task(Scores(client, keys, "t").ask([job("a:0"), job("a:1")], LONG_S))
    jobs, answers = scorer(client, keys), keys.score_answers + "t"
    first, second = await all_of(jobs, 2)
    for _ in range(3):
        await client.rpush(answers, b"junk")
    await jobs.answer([scored(first)])
    await _is_read(client, "lrange")
    await client.delete(answers)
    await _is_read(client, "llen")
    await jobs.answer([scored(second)])
    assert {one.seq_id for one in await asking} == {"a:0", "a:1"}


async def test_jobs_that_the_broker_lost_are_put_out_again(client: Any, keys: Keys) -> None:
    asking = asyncio.create_task(Scores(client, keys, "t").ask([job("a:0"), job("a:1")], LONG_S))
    jobs = scorer(client, keys)
    first = await all_of(jobs, 2)
    await client.delete(keys.score_jobs)
    again = await all_of(jobs, 2)
    assert sorted(names(again)) == sorted(names(first)) == ["a:0", "a:1"]
    assert await jobs.answer([scored(one) for one in [*first, *again]]) == 2
    assert len(await asking) == 2
    await nothing_is_left(client, keys)


async def test_a_group_that_the_broker_lost_is_made_again(client: Any, keys: Keys) -> None:
    jobs = scorer(client, keys)
    await put(client, keys, job("a:0"))
    taken = await all_of(jobs, 1)
    await client.xgroup_destroy(keys.score_jobs, SCORE_GROUP)
    other = scorer(client, keys, "other")
    assert names(await other.take(8, 1)) == ["a:0"]  # nobody knows who holds it
    await client.delete(keys.score_jobs)
    await jobs.release()
    await put(client, keys, job("a:1"))
    assert await jobs.answer([scored(taken[0])]) == 0
    assert names(await jobs.take(8, 1)) == ["a:1"]


async def test_a_group_that_vanishes_under_a_waiting_scorer_ends_the_wait_alone(
    broker_config: BrokerConfig, client: Any, keys: Keys
) -> None:
    async with connect(replace(broker_config, socket_timeout_s=2 * RUN_S)) as patient:
        jobs = scorer(patient, keys)
        waiting = asyncio.create_task(jobs.take(8, int(RUN_S * 1000)))
        await eventually(lambda: _is_blocked(client), "the scorer to wait")
        await client.delete(keys.score_jobs)
        assert await asyncio.wait_for(waiting, HANG_S) == []
        await put(client, keys, job("a:0"))
        assert names(await jobs.take(8, 1)) == ["a:0"]


async def test_an_outage_of_the_broker_costs_no_score(tmp_path: Path, keys: Keys) -> None:
    away = KillableBroker(tmp_path)
    away.start()
    try:
        config = BrokerConfig(url=away.url, retry_for_s=LONG_S)
        await wait_ready(config)
        async with connect(config) as ours, connect(config) as theirs:
            asking = asyncio.create_task(Scores(ours, keys, "t").ask([job("a:0")], LONG_S))
            jobs = scorer(theirs, keys)
            [taken] = await all_of(jobs, 1)
            away.kill()
            answering = asyncio.create_task(jobs.answer([scored(taken)]))
            await asyncio.wait({asking, answering}, timeout=0.3)
            assert not asking.done()
            assert not answering.done()
            away.start()
            await answering
            serving = asyncio.create_task(serve(jobs, 1))  # where the broker lost the job, it comes again
            assert [one.seq_id for one in await asking] == ["a:0"]
            serving.cancel()
    finally:
        away.kill()


async def _is_read(client: Any, command: str) -> None:
    """The trainer sends this command once more."""

    async def calls() -> int:
        return int((await client.info("commandstats")).get(f"cmdstat_{command}", {}).get("calls", 0))

    before = await calls()

    async def sent() -> bool:
        return await calls() > before

    await eventually(sent, f"another {command}")


async def _is_blocked(client: Any) -> bool:
    return int((await client.info("clients"))["blocked_clients"]) > 0
