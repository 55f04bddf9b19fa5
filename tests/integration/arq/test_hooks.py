"""What is called around jobs and workers, and the context it is given."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.jobs import Job, JobStatus
from arq.worker import Retry, func
from redis.asyncio import Redis

from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, letters, serving, tally, until


async def nothing(ctx: dict[Any, Any]) -> None:
    pass


async def breaks(ctx: dict[Any, Any]) -> None:
    raise LookupError("no such lamp")


async def forever(ctx: dict[Any, Any]) -> None:
    await asyncio.Event().wait()


class Seen:
    """Hooks that note their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def named(self, name: str) -> Any:
        async def hook(ctx: dict[Any, Any]) -> None:
            self.calls.append((name, ctx.get("job_id", "")))

        return hook

    def around_jobs(self) -> dict[str, Any]:
        return {name: self.named(name) for name in ("on_job_start", "on_job_end", "after_job_end")}

    def of(self, job: Job | None) -> list[str]:
        assert job is not None
        return [name for name, job_id in self.calls if job_id == job.job_id]


ALL = ["on_job_start", "on_job_end", "after_job_end"]


@pytest.fixture
def seen() -> Seen:
    return Seen()


async def test_startup_and_shutdown(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    async def look(ctx: dict[Any, Any]) -> None:
        seen.calls.append(("job", ""))

    await foreign.enqueue_job("look")
    hooks = {name: seen.named(name) for name in ("on_startup", "on_shutdown")}
    worker = make_worker(func(look, name="look"), **hooks)
    await burst(worker)
    await worker.close()
    assert [name for name, _ in seen.calls] == ["on_startup", "job", "on_shutdown"]


async def test_hooks_around_a_job_that_succeeds(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    jobs = [await foreign.enqueue_job("nothing") for _ in range(3)]
    worker = make_worker(func(nothing, name="nothing"), **seen.around_jobs())
    await burst(worker)
    assert [seen.of(job) for job in jobs] == [ALL] * 3
    assert tally(worker) == (3, 0, 0)


async def test_hooks_around_a_job_that_fails(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    job = await foreign.enqueue_job("breaks")
    worker = make_worker(func(breaks, name="breaks"), **seen.around_jobs())
    await burst(worker)
    assert seen.of(job) == ALL
    assert tally(worker) == (0, 1, 0)


async def test_hooks_around_each_try(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    async def again(ctx: dict[Any, Any]) -> None:
        if ctx["job_try"] == 1:
            raise Retry(defer=0.01)

    job = await foreign.enqueue_job("again")
    await burst(make_worker(func(again, name="again"), **seen.around_jobs()))
    assert seen.of(job) == ALL * 2


async def test_hooks_around_a_job_that_is_aborted(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    job = await foreign.enqueue_job("forever")
    assert job is not None
    async with serving(make_worker(func(forever, name="forever"), **seen.around_jobs())):
        await until(lambda: seen.of(job) == ALL[:1], "the job to start")
        assert await job.abort(timeout=HANG_S, poll_delay=0.01) is True
        await until(lambda: seen.of(job) == ALL, "the hooks of its end")


async def test_no_hooks_around_what_is_not_started(foreign: ArqRedis, make_worker: MakeWorker, seen: Seen) -> None:
    await foreign.enqueue_job("missing")
    await burst(make_worker(func(nothing, name="nothing"), **seen.around_jobs()))
    assert seen.calls == []


@pytest.mark.parametrize("name", ["nothing", "breaks"])
async def test_after_the_end_means_that_the_result_is_there(
    foreign: ArqRedis, make_worker: MakeWorker, name: str
) -> None:
    statuses: list[JobStatus] = []
    job = await foreign.enqueue_job(name)
    assert job is not None

    async def after(ctx: dict[Any, Any]) -> None:
        statuses.append(await job.status())

    functions = func(nothing, name="nothing"), func(breaks, name="breaks")
    await burst(make_worker(*functions, after_job_end=after))
    assert statuses == [JobStatus.complete]


async def test_a_hook_that_fails_costs_its_job_and_no_other(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """Differs from arq, whose worker ends over it."""

    async def start(ctx: dict[Any, Any]) -> None:
        if ctx["job_id"].endswith("bad"):
            raise RuntimeError("no camera")

    bad = await foreign.enqueue_job("nothing", _job_id=f"{keys.run}:bad")
    good = await foreign.enqueue_job("nothing")
    await burst(make_worker(func(nothing, name="nothing"), on_job_start=start))
    with pytest.raises(Exception, match="no camera"):
        await answer(bad)
    assert await answer(good) is None
    assert list(await letters(client, keys)) == [f"{keys.run}:bad"]


async def test_the_context_of_a_job(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys) -> None:
    contexts: list[dict[Any, Any]] = []

    async def startup(ctx: dict[Any, Any]) -> None:
        ctx["model"] = ["shared"]

    async def look(ctx: dict[Any, Any]) -> None:
        contexts.append(dict(ctx))
        ctx["mine"] = True
        if ctx["job_try"] == 1:
            raise Retry(defer=0.01)

    at = datetime.now(UTC)
    job = await foreign.enqueue_job("look")
    worker = make_worker(func(look, name="look"), on_startup=startup, ctx={"given": 7})
    await burst(worker)
    first, second = contexts
    assert job is not None
    assert first["job_id"] == second["job_id"] == job.job_id
    assert (first["job_try"], second["job_try"]) == (1, 2)
    assert first["given"] == 7
    assert first["model"] is second["model"], "what the start-up made is shared"
    assert "mine" not in second, "what a job adds is its own"
    assert abs(first["enqueue_time"] - at) < timedelta(seconds=60)
    assert first["enqueue_time"] == second["enqueue_time"]
    assert abs(first["score"] / 1000 - at.timestamp()) < 60
    assert first["redis"].default_queue_name == keys.jobs
    assert await first["redis"].ping()


async def test_functions_by_path_by_name_and_as_they_are(foreign: ArqRedis, make_worker: MakeWorker) -> None:
    worker = make_worker(nothing, "asyncio.sleep", func(breaks, name="renamed"))
    assert worker.served() == ["asyncio.sleep", "nothing", "renamed"]
    plain = await foreign.enqueue_job("nothing")
    bad = await foreign.enqueue_job("asyncio.sleep")  # it takes the context for the seconds
    renamed = await foreign.enqueue_job("renamed")
    await burst(worker)
    assert await answer(plain) is None
    with pytest.raises(Exception, match="TypeError"):
        await answer(bad)
    with pytest.raises(Exception, match="no such lamp"):
        await answer(renamed)
    assert tally(worker) == (1, 2, 0)


async def test_an_unknown_function_is_a_dead_letter(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis
) -> None:
    """Differs from arq: the job is kept, for a replay once a worker knows the function."""
    job = await foreign.enqueue_job("missing", 1, _job_id=f"{keys.run}:a")
    worker = make_worker(func(nothing, name="nothing"))
    await burst(worker)
    with pytest.raises(Exception, match="'missing'"):
        await answer(job)
    letter = (await letters(client, keys))[f"{keys.run}:a"]
    assert letter.reason == "unknown_function"
    assert "nothing" in letter.detail, "it says what this worker serves"
    assert tally(worker) == (0, 1, 0)


def test_a_worker_without_functions_is_refused(make_worker: MakeWorker) -> None:
    with pytest.raises(RuntimeError, match="at least one"):
        make_worker()
