"""Signals and stops: no more claims, what runs may finish, the rest is handed back without blame."""

from __future__ import annotations

import asyncio
import functools
import signal
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import JobStatus
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.queue import leased_worker
from sluice.pipeline.wire.keys import Keys
from tests.clock import Ahead
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, counts, letters, reaches, tally, until


class Gate:
    """A job that waits for it to open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.tries: list[int] = []

    def function(self) -> Any:
        async def wait(ctx: dict[Any, Any], patient: bool = False) -> int:
            self.tries.append(ctx["job_try"])
            await (asyncio.Event() if patient and ctx["job_try"] == 1 else self.open).wait()
            return ctx["job_try"]

        return func(wait, name="wait")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_jobs_finish_and_claims_no_more(
    foreign: ArqRedis, make_worker: MakeWorker, gate: Gate, number: signal.Signals
) -> None:
    running = await foreign.enqueue_job("wait")
    assert running is not None
    stopped: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    before = signal.getsignal(number)
    worker = make_worker(gate.function(), burst=False, handle_signals=True)
    worker.on_stop = stopped.append
    try:
        assert signal.getsignal(number) is not before, "the worker has set its handlers"
        task = asyncio.create_task(worker.main())
        await reaches(running, JobStatus.in_progress)
        signal.raise_signal(number)
        await until(worker.stop.is_set, "the signal to arrive")
        late = await foreign.enqueue_job("wait")
        gate.open.set()
        async with asyncio.timeout(HANG_S):
            await task
    finally:
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
        signal.signal(number, before)
    assert await answer(running) == 1
    assert late is not None
    assert await late.status() == JobStatus.queued
    assert stopped == [number]
    assert tally(worker) == (1, 0, 0)


async def test_what_does_not_finish_in_time_runs_again_elsewhere(
    foreign: ArqRedis,
    make_worker: MakeWorker,
    keys: Keys,
    client: Redis,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """arq keeps such a job hidden for its longest timeout; ours is ready the moment its worker ends."""
    short, long = await foreign.enqueue_job("wait"), await foreign.enqueue_job("wait", patient=True)
    assert short is not None
    assert long is not None
    settings = {"drain_s": 2 * HANG_S, "lease_s": 600.0, "stall_timeout_s": 1e9}
    worker = make_worker(gate.function(), burst=False, settings=settings)
    task = asyncio.create_task(worker.main())
    await until(lambda: len(gate.tries) == 2, "both jobs to run")
    worker.handle_sig(signal.SIGTERM)
    gate.open.set()
    assert await answer(short) == 1
    clock = Ahead(monkeypatch, leased_worker)
    async with asyncio.timeout(HANG_S):
        while not task.done():
            clock.by_s += 2 * HANG_S
            await asyncio.sleep(0.01)
    await task
    assert tally(worker) == (1, 0, 1)
    assert await long.status() == JobStatus.queued
    await burst(make_worker(gate.function(), name="next"))
    assert await answer(long) == 2
    assert await letters(client, keys) == {}
    assert (await counts(client, keys)).get("redelivered", 0) == 0, "nobody is to blame"


async def test_a_cancelled_function_ends_before_its_worker_shuts_down(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys
) -> None:
    """What `on_shutdown` closes is used in its `finally`."""
    order: list[str] = []
    began = asyncio.Event()

    async def tidy(ctx: dict[Any, Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await ctx["redis"].ping()
            order.append("tidied up")

    async def shut_down(ctx: dict[Any, Any]) -> None:
        order.append("shut down")

    job = await foreign.enqueue_job("tidy")
    assert job is not None
    worker = make_worker(func(tidy, name="tidy"), burst=False, settings={"drain_s": 0.0}, on_shutdown=shut_down)
    task = asyncio.create_task(worker.main())
    await until(began.is_set, "the job to run")
    worker.handle_sig(signal.SIGTERM)
    async with asyncio.timeout(HANG_S):
        await task
        await worker.close()
    assert order == ["tidied up", "shut down"]


async def test_a_lost_lease_costs_no_try(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, gate: Gate
) -> None:
    """Nor does the death of a worker: blame.lua counts those."""
    job = await foreign.enqueue_job("wait", patient=True)
    assert job is not None
    dead = make_worker(gate.function(), name="dead")
    [claim] = (await dead.leases.queue.claim(1, 0.05, 3)).claims
    assert claim.attempt == 1
    await until(functools.partial(_is_over, client, keys, job.job_id), "the lease to expire")
    gate.open.set()
    next_one = make_worker(gate.function(), name="next", max_tries=1)
    await burst(next_one)
    assert await answer(job) == 2
    assert tally(next_one) == (1, 0, 0)


async def _is_over(client: Any, keys: Keys, job_id: str) -> bool:
    ends, (seconds, micros) = await client.zscore(keys.leases, job_id), await client.time()
    return ends < seconds * 1000 + micros / 1000


async def test_a_stop_costs_no_try(foreign: ArqRedis, make_worker: MakeWorker, gate: Gate) -> None:
    """Differs from arq, which counts it: a job of one try would fail for its worker's restart."""
    job = await foreign.enqueue_job("wait", patient=True)
    assert job is not None
    for attempt, name in enumerate(("one", "two"), 1):
        worker = make_worker(gate.function(), name=name, burst=False, max_tries=1, settings={"drain_s": 0.0})
        gate.open.clear()
        task = asyncio.create_task(worker.main())
        await until(lambda: len(gate.tries) == attempt, "the job to run")  # noqa: B023 - called in this turn alone
        worker.stop.set()
        worker.wake.set()
        async with asyncio.timeout(HANG_S):
            await task
    gate.open.set()
    last = make_worker(gate.function(), name="last", max_tries=1)
    await burst(last)
    assert tally(last) == (1, 0, 0)
