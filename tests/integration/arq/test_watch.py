"""Idle workers: one looks for what rings no bell, the others sleep until they are needed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from arq.connections import ArqRedis

from sluice.pipeline.queue import ArqWorker, Call, JobQueue, func, leased_worker
from sluice.pipeline.queue.types import Claimed
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import serving, until

POLL_S = 0.05
WATCH_S = 40 * POLL_S


async def nothing(ctx: dict[Any, Any]) -> None:
    pass


@pytest.fixture
def idle(make_worker: MakeWorker) -> list[ArqWorker]:
    call = func(nothing, name="nothing")
    return [make_worker(call, name=f"w{number}", settings={"poll_s": POLL_S}, max_jobs=2) for number in range(6)]


@pytest.fixture
def no_claim_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks in place of the watcher was told to: it did not wait for the end of the watcher's claim."""
    monkeypatch.setattr(leased_worker, "_WATCH_POLLS", 2 * HANG_S / POLL_S)


async def watcher(client: Any, keys: Keys) -> str:
    return (await client.get(keys.watch) or b"").decode()


async def _other_than(owner: str, client: Any, keys: Keys) -> bool:
    return await watcher(client, keys) not in ("", owner)


def claims_counted(workers: list[ArqWorker]) -> Counter[str]:
    """How often each of them asks for jobs from now on, by its queue's owner."""
    asked: Counter[str] = Counter()

    def counting(queue: JobQueue) -> None:
        claim = queue.claim

        async def counted(*args: Any, **kwargs: Any) -> Claimed:
            asked[queue.owner] += 1
            return await claim(*args, **kwargs)

        queue.claim = counted

    for worker in workers:
        counting(worker.leases.queue)
    return asked


@pytest.mark.usefixtures("no_claim_runs_out")
async def test_one_of_many_idle_workers_polls(client: Any, keys: Keys, idle: list[ArqWorker]) -> None:
    asked = claims_counted(idle)
    async with serving(*idle):
        await until(lambda: len(asked) == len(idle) and max(asked.values()) >= 20, "all to ask, and one of them often")
        assert sorted(asked.values())[:-1] == [1] * (len(idle) - 1), asked
        assert await watcher(client, keys) == asked.most_common(1)[0][0]
        await client.pexpire(keys.watch, int(1000 * HANG_S))

        async def is_renewed() -> bool:
            return await client.pttl(keys.watch) > 1000 * HANG_S

        await until(is_renewed, "the watcher to renew its claim")


@pytest.mark.usefixtures("no_claim_runs_out")
async def test_a_job_that_rings_no_bell_starts_within_a_poll(
    client: Any, keys: Keys, idle: list[ArqWorker], foreign: ArqRedis
) -> None:
    async with serving(*idle):
        await until(lambda: watcher(client, keys), "a worker to look")
        for number in range(12):
            job = await foreign.enqueue_job("nothing", _job_id=f"{keys.run}:{number}")
            assert job is not None
            await job.result(timeout=HANG_S, poll_delay=0.005)


async def test_the_dead_ones_part_is_taken_within_its_time(
    client: Any, keys: Keys, idle: list[ArqWorker], foreign: ArqRedis
) -> None:
    dead = JobQueue(client, keys, worker="dead")
    assert (await dead.claim(1, 600, 3, watch_s=WATCH_S)).again_s == 0
    assert -1 != await client.pttl(keys.watch) <= 1000 * WATCH_S, "it runs out, or has by now"
    async with serving(*idle):
        await until(lambda: _other_than(dead.owner, client, keys), "another worker to look")
        job = await foreign.enqueue_job("nothing", _job_id=f"{keys.run}:0")
        assert job is not None
        await job.result(timeout=HANG_S, poll_delay=0.005)


async def test_who_is_busy_or_stops_gives_the_part_away(client: Any, keys: Keys) -> None:
    one, other = JobQueue(client, keys, worker="one"), JobQueue(client, keys, worker="other")
    assert (await one.claim(2, 600, 3, watch_s=600)).again_s == 0
    assert 10 < (await other.claim(2, 600, 3, watch_s=600)).again_s <= 600
    await client.delete(keys.wake)
    await one.enqueue_calls([Call(job_id=f"{keys.run}:1", function="f")])
    await client.delete(keys.wake)
    assert len((await one.claim(2, 600, 3, watch_s=600)).claims) == 1
    assert await client.llen(keys.wake) == 1, "an idle one is woken"
    assert await watcher(client, keys) == f"busy:{one.owner}", "until one comes"
    assert (await other.claim(2, 600, 3, watch_s=600)).again_s == 0
    assert await watcher(client, keys) == other.owner
    assert (await one.claim(1, 600, 3, 1, watch_s=600)).again_s == 0, "whoever holds jobs looks as often as ever"
    await client.delete(keys.wake)
    await other.claim(0, 600, 3, 1, watch_s=600)
    assert (await watcher(client, keys), await client.llen(keys.wake)) == ("", 1), "no room, so another one is woken"
    await one.claim(1, 600, 3, 0, watch_s=600)
    await one.stand_down(0)
    assert await watcher(client, keys) == ""
    await one.claim(1, 600, 3, 0, watch_s=600)
    await other.reap(one.owner)
    assert await watcher(client, keys) == ""


async def test_who_is_busy_and_alone_is_not_woken_by_itself(client: Any, keys: Keys) -> None:
    one = JobQueue(client, keys, worker="one")
    await one.claim(2, 600, 3, watch_s=600)
    await one.enqueue_calls([Call(job_id=f"{keys.run}:1", function="f")])
    await client.delete(keys.wake)
    assert len((await one.claim(2, 600, 3, watch_s=600)).claims) == 1
    assert await client.llen(keys.wake) == 0, "nobody sleeps who could take the watch"
    assert (await JobQueue(client, keys, worker="other").claim(2, 600, 3, watch_s=600)).again_s == 0
    await one.claim(1, 600, 3, 1, watch_s=600)
    assert await client.llen(keys.wake) == 0, "the watch is the other's"


async def test_who_learns_of_new_weights_wakes_the_next(client: Any, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="one")
    await queue.claim(1, 600, 3, watch_s=600)
    await client.delete(keys.wake)
    await client.set(keys.latest, 3)
    assert (await queue.claim(1, 600, 3, watch_s=600)).latest == 3
    assert await client.lpop(keys.wake) is not None
    assert (await queue.claim(1, 600, 3, watch_s=600)).latest == 3
    assert await client.lpop(keys.wake) is None
