"""The loop with a Holder of five methods: what it asks for, and what becomes of jobs that are held at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.pipeline.config.types import BrokerConfig, Config, WorkerConfig
from sluice.pipeline.errors import EngineError, EngineHangs
from sluice.pipeline.queue import Claim, Finished, Hooks, JobQueue, LeasedWorker
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.factories import decode_job, sequence_result
from tests.integration.test_jobs import PLENTY
from tests.roles import eventually


class Shelf:
    """Holds jobs until it is told to finish them; jobs named `quick` at once."""

    def __init__(self, leases: LeasedWorker, size: int = 4) -> None:
        self._leases, self._size = leases, size
        self.claims: dict[str, Claim] = {}

    def room(self) -> int:
        return self._size - len(self.claims)

    def held(self) -> Collection[str]:
        return self.claims.keys()

    async def accept(self, claim: Claim) -> None:
        self.claims[claim.job_id] = claim
        if "quick" in claim.job_id:
            self.finish(claim.job_id)

    def lose(self, job_id: str, attempt: int | None) -> bool:
        claim = self.claims.get(job_id)
        if claim is None or attempt not in (None, claim.attempt):
            return False
        del self.claims[job_id]
        return True

    def take_back(self, *, started: bool) -> list[Claim]:
        given, self.claims = (list(self.claims.values()), {}) if started else ([], self.claims)
        return given

    def finish(self, job_id: str) -> None:
        claim = self.claims.pop(job_id)
        self._leases.committer.put(Finished(claim, sequence_result(job_id)))
        self._leases.ended(claim)


@pytest.fixture
def leases(broker_config: BrokerConfig, client: Redis, keys: Keys) -> LeasedWorker:
    section = WorkerConfig(poll_s=0.01, lease_s=60.0, renew_s=0.05, drain_s=0.05)
    return LeasedWorker(client=client, keys=keys, config=Config(run=keys.run, broker=broker_config, worker=section))


async def enqueue(client: Any, keys: Keys, *names: str) -> None:
    jobs = [decode_job(f"{keys.run}:{name}") for name in names]
    assert set(await JobQueue(client, keys).enqueue(jobs, PLENTY)) == {"enqueued"}


async def holding(shelf: Shelf, number: int) -> None:
    async def is_so() -> bool:
        return len(shelf.held()) == number

    await eventually(is_so, f"{number} held jobs")


async def test_a_job_starts_before_the_queue_is_asked_again(client: Any, keys: Keys, leases: LeasedWorker) -> None:
    order = list[str]()
    started = asyncio.Event()

    class Starter(Shelf):
        async def accept(self, claim: Claim) -> None:
            await super().accept(claim)
            order.append("accepted")
            asyncio.get_running_loop().call_soon(lambda: (order.append("started"), started.set()))

    async def asks() -> None:
        order.append("asks")

    serving = asyncio.create_task(leases.serve(Starter(leases), Hooks(before_claim=asks)))
    await enqueue(client, keys, "a")
    async with asyncio.timeout(HANG_S):
        await started.wait()
    at = order.index("accepted")
    assert order[at : at + 2] == ["accepted", "started"]
    leases.stop.set()
    leases.wake.set()
    await serving


async def test_it_claims_what_fits_and_what_is_held_at_a_stop_goes_back_without_blame(
    client: Any, keys: Keys, leases: LeasedWorker
) -> None:
    shelf = Shelf(leases, size=2)
    await enqueue(client, keys, "quick", "a", "b", "c")
    serving = asyncio.create_task(leases.serve(shelf, Hooks()))
    await holding(shelf, 2)
    shelf.finish(next(iter(shelf.held())))
    leases.wake.set()
    await holding(shelf, 2)
    leases.stop.set()
    leases.wake.set()
    await serving
    assert (await snapshot(client, keys)).committed == 2
    left = (await JobQueue(client, keys).claim(8, 30, 3)).claims
    assert [(claim.attempt, claim.tries, claim.alone) for claim in left] == [(2, 0, False)] * 2


async def test_an_aborted_job_is_lost_to_its_holder(client: Any, keys: Keys, leases: LeasedWorker) -> None:
    shelf = Shelf(leases)
    await enqueue(client, keys, "a", "b")
    serving = asyncio.create_task(leases.serve(shelf, Hooks()))
    await holding(shelf, 2)
    assert await JobQueue(client, keys).cancel([f"{keys.run}:a"]) == 1
    await holding(shelf, 1)
    assert list(shelf.held()) == [f"{keys.run}:b"]
    leases.stop.set()
    leases.wake.set()
    await serving


def _reported(leases: LeasedWorker) -> Hooks:
    return Hooks(after_claim=lambda got: leases.broke(EngineError("out of oil")) if got.claims else None)


def _raised(leases: LeasedWorker) -> Hooks:
    async def beat() -> None:
        if leases.keeper.held():
            raise EngineError("out of oil")

    return Hooks(beat=beat)


@pytest.mark.parametrize("make", [_reported, _raised])
async def test_a_failing_engine_ends_it_and_its_jobs_go_back_with_blame(
    client: Any, keys: Keys, leases: LeasedWorker, make: Callable[[LeasedWorker], Hooks]
) -> None:
    await enqueue(client, keys, "a")
    with pytest.raises(EngineError, match="out of oil"):
        async with asyncio.timeout(HANG_S):
            await leases.serve(Shelf(leases), make(leases))
    assert await client.hget(f"{keys.job_state}{keys.run}:a", "shared") == b"1"


@pytest.mark.parametrize("waits_in", ["before a claim", "accept"])
async def test_an_engine_that_hangs_while_new_weights_are_awaited_ends_it_too(
    client: Any, keys: Keys, leases: LeasedWorker, waits_in: str
) -> None:
    """They are on their way to an engine that had nothing to do, and then got the first job."""

    class Pinned(Shelf):
        async def accept(self, claim: Claim) -> None:
            if waits_in == "accept" and self.held():
                await asyncio.Event().wait()
            await super().accept(claim)

    shelf, section = Pinned(leases), leases.settings

    async def load() -> None:
        if waits_in == "before a claim" and shelf.held():
            await asyncio.Event().wait()

    hooks = Hooks(
        progress=lambda: time.monotonic() - (section.stall_timeout_s + 1 if shelf.held() else 0), before_claim=load
    )
    await enqueue(client, keys, "a", "b")
    with pytest.raises(EngineHangs):
        async with asyncio.timeout(HANG_S):
            await leases.serve(shelf, hooks)
    blamed = [await client.hget(f"{keys.job_state}{keys.run}:{name}", "shared") for name in "ab"]
    assert blamed == [b"1", b"1" if waits_in == "before a claim" else None], "one that hasn't begun has no blame"


async def test_a_job_that_cannot_be_accepted_takes_no_neighbour_with_it(
    client: Any, keys: Keys, leases: LeasedWorker
) -> None:
    """Claims of the same answer that nobody accepted yet go back at once, and nobody is blamed."""

    class Torn(Shelf):
        async def accept(self, claim: Claim) -> None:
            if len(self.claims) == 1:
                raise RedisError("the broker is away")
            await super().accept(claim)

    await enqueue(client, keys, "a", "b", "c", "d")
    with pytest.raises(RedisError, match="away"):
        async with asyncio.timeout(HANG_S):
            await leases.serve(Torn(leases), Hooks())
    left = (await JobQueue(client, keys).claim(8, 30, 3)).claims
    assert [(claim.attempt, claim.tries, claim.alone) for claim in left] == [(2, 0, False)] * 4


async def test_nothing_is_claimed_after_a_stop(client: Any, keys: Keys, leases: LeasedWorker) -> None:
    async def pull_weights() -> None:
        leases.stop.set()

    shelf = Shelf(leases)
    await enqueue(client, keys, "a")
    async with asyncio.timeout(HANG_S):
        await leases.serve(shelf, Hooks(before_claim=pull_weights))
    assert [claim.attempt for claim in (await JobQueue(client, keys).claim(8, 30, 3)).claims] == [1]


async def test_a_job_that_the_holder_has_forgotten_is_not_renewed(
    client: Any, keys: Keys, leases: LeasedWorker
) -> None:
    shelf = Shelf(leases)
    await enqueue(client, keys, "a")
    serving = asyncio.create_task(leases.serve(shelf, Hooks()))
    await holding(shelf, 1)
    shelf.claims.clear()
    await JobQueue(client, keys).cancel([f"{keys.run}:a"])

    async def dropped() -> bool:
        return not leases.keeper.held()

    await eventually(dropped, "the keeper to drop it")
    leases.stop.set()
    leases.wake.set()
    await serving


async def test_text_with_half_a_character_ends_its_job_alone(client: Any, keys: Keys, leases: LeasedWorker) -> None:
    class Failing(Shelf):
        async def accept(self, claim: Claim) -> None:
            await self._leases.fail(claim, "failed", "a file named \udcff", "Traceback: \udcff")

    await enqueue(client, keys, "a")
    serving = asyncio.create_task(leases.serve(Failing(leases), Hooks()))

    async def dead() -> bool:
        return (await snapshot(client, keys)).dead == 1

    await eventually(dead, "the dead letter")
    leases.stop.set()
    leases.wake.set()
    await serving
