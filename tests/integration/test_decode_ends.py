"""How a job of a decode worker may end or go on: deadlines, stored progress, plain calls, running alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sluice.pipeline.config.types import BrokerConfig, Config, ModelConfig
from sluice.pipeline.errors import EngineError, first_cause
from sluice.pipeline.queue import Claim, Credit, JobQueue, LeaseKeeper, arq_pool
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_RUNNING, Keys
from sluice.pipeline.wire.messages import Progress, SamplingParams, SequenceResult, decode
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.decode_workers import hold_steps, working
from tests.factories import decode_job
from tests.roles import eventually, run_config
from tests.tiny_models import save_tiny_model

PLENTY = Credit(10_000, 10_000, 1)
_ROUNDED_S = 0.001  # timings have four digits
LONG = SamplingParams(max_new_tokens=200, temperature=0.0)  # greedy does not end by itself here; seeds hang on the run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"lease_s": 60.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 0.0, "checkpoint_tokens": 4}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})


async def results(client: Any, keys: Keys) -> list[SequenceResult]:
    return [
        decode(SequenceResult, fields[b"r"]) for _, fields in await client.xrange(keys.results + "0") if b"r" in fields
    ]


async def test_progress_of_a_running_sequence_reaches_the_next_worker(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    job = decode_job(f"{keys.run}:a", sampling=LONG)
    assert await JobQueue(client, keys).enqueue([job], PLENTY) == ["enqueued"]
    gate = threading.Event()
    async with working(config, backend) as worker:
        store = worker._store

        def hold(claim: Claim, index: int, progress: Progress) -> None:
            """In the engine's thread: the sequence is still running when its worker is stopped."""
            store(claim, index, progress)
            if progress.offset:
                gate.wait(HANG_S)

        worker._store = hold  # type: ignore[method-assign]

        async def stored() -> bool:
            return worker.leases.committer.pieces >= 2

        await eventually(stored, "two pieces of progress")
    gate.set()
    [claim] = (await JobQueue(client, keys).claim(1, 30, 3)).claims
    progress = claim.progress[0]
    assert len(progress.token_ids) >= 8
    assert len(progress.token_ids) == len(progress.logprobs) == len(progress.versions)
    await JobQueue(client, keys).reap(str((await client.hget(f"{keys.job_state}{claim.job_id}", "owner")).decode()))
    async with working(config, backend, "next"):

        async def committed() -> bool:
            return bool(await results(client, keys))

        await eventually(committed, "the result")
    [result] = await results(client, keys)
    stored_ids = list(progress.token_ids)
    assert result.resumed_tokens == len(stored_ids), "decoded on, not anew"
    assert list(result.token_ids)[: len(stored_ids)] == stored_ids
    assert int(await client.hget(keys.counts, "bytes")) == await client.xlen(keys.results + "0") * len(
        (await client.xrange(keys.results + "0"))[0][1][b"r"]
    )


async def test_what_a_stopped_worker_has_of_a_sequence_is_stored_whole(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    """One sequence reports every third token and holds the engine; the other never reports while it runs."""
    few = msgspec.structs.replace(config.worker, checkpoint_tokens=10_000)
    streamed = decode_job(f"{keys.run}:a", sampling=LONG, reply_to="caller", stream_every=3)
    jobs = [streamed, decode_job(f"{keys.run}:b", sampling=LONG)]
    assert await JobQueue(client, keys).enqueue(jobs, PLENTY) == ["enqueued"] * 2
    is_held = threading.Event()
    async with working(msgspec.structs.replace(config, worker=few), backend) as worker:
        store = worker._store

        def hold(claim: Claim, index: int, progress: Progress) -> None:
            """In the engine's thread: first until both run, then until the stop reaches the engine."""
            store(claim, index, progress)
            until = time.monotonic() + HANG_S
            while worker._slots.running < 2 and time.monotonic() < until:
                time.sleep(0.001)
            if progress.offset >= 6 and not is_held.is_set():
                is_held.set()
                while not backend._thread._aborted and time.monotonic() < until:
                    time.sleep(0.001)

        worker._store = hold  # type: ignore[method-assign]

        async def held() -> bool:
            return is_held.is_set()

        await eventually(held, "both sequences to run")
    claims = {claim.job_id: claim for claim in (await JobQueue(client, keys).claim(2, 30, 3)).claims}
    assert len(claims[jobs[0].job_id].progress[0].token_ids) >= 9
    rest = claims[jobs[1].job_id].progress[0]
    assert rest.offset == 0
    assert 0 < len(rest.token_ids) < LONG.max_new_tokens
    assert not await results(client, keys), "neither was committed as an ended one"


async def test_a_claim_says_how_long_the_job_may_take(client: Any, keys: Keys) -> None:
    queue = JobQueue(client, keys)
    await queue.enqueue(
        [decode_job(f"{keys.run}:{i}", deadline_s=deadline) for i, deadline in ((0, 500.0), (1, None))], PLENTY
    )
    limited, free = (await queue.claim(2, 30, 3)).claims
    assert limited.deadline_at is not None
    assert 0 < limited.deadline_at - time.monotonic() <= 500
    assert free.deadline_at is None


async def test_a_plain_call_is_answered_and_an_unknown_one_is_a_dead_letter(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    pool = arq_pool(client, keys.jobs)
    ping, other = await pool.enqueue_job("ping"), await pool.enqueue_job("teapot", 1, x=2)
    assert ping
    assert other
    async with working(config, backend):
        assert (await ping.result(timeout=HANG_S, poll_delay=0.01))["worker"] == "w"
        with pytest.raises(Exception, match=r"teapot.*decode, ping"):
            await other.result(timeout=HANG_S, poll_delay=0.01)
    assert (await snapshot(client, keys)).reasons == {"dead:unknown_function": 1}


async def _started_beside_a_suspect(config: Config, backend: HfBackend, client: Any, keys: Keys, name: str) -> bool:
    """Whether other jobs were decoded while a suspect was; none may start before it."""
    queue = JobQueue(client, keys)
    before = len(await results(client, keys))
    await queue.enqueue([decode_job(f"{keys.run}:{name}", sampling=LONG)], PLENTY)
    for _ in range(2):
        [claim] = (await queue.claim(1, 30, 3)).claims
        await queue.release([claim], blame="a test")
    await queue.enqueue([decode_job(f"{keys.run}:{name}-{other}", n=3) for other in "abcd"], PLENTY)
    async with working(config, backend):

        async def over() -> bool:
            return (await snapshot(client, keys)).committed == before + 13

        await eventually(over, "all sequences")
    times = {one.seq_id: (one.timings["finished_at"] - one.timings["decode_s"], one.timings["finished_at"])
             for one in (await results(client, keys))[before:]}  # fmt: skip
    began, ended = times.pop(f"{keys.run}:{name}:0")
    beside = [start for start, end in times.values() if end > began + _ROUNDED_S and start < ended - _ROUNDED_S]
    assert min(beside, default=ended) > began
    return bool(beside)


async def test_a_suspect_without_progress_runs_alone(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    config = replace(config, worker=replace(config.worker, checkpoint_tokens=0))
    assert not await _started_beside_a_suspect(config, backend, client, keys, "suspect")


async def test_a_suspect_runs_alone_until_it_gets_on(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    config = replace(config, worker=replace(config.worker, checkpoint_tokens=4))
    for attempt in range(20):  # it may end before the worker has claimed another job
        if await _started_beside_a_suspect(config, backend, client, keys, f"suspect{attempt}"):
            return
    pytest.fail("no job was decoded beside any of 20 suspects, all of which got on")


async def test_an_engine_that_fails_hands_its_jobs_back_with_blame(
    config: Config, source: Path, client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    await JobQueue(client, keys).enqueue([decode_job(f"{keys.run}:a", n=64, sampling=LONG)], PLENTY)
    # A job that has stored progress isn't blamed, nor is one of which a sequence is committed.
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, checkpoint_tokens=0))
    dying = HfBackend(ModelConfig(path=str(source), device="cpu"), max_batch=4)
    await dying.start()
    hold_steps(monkeypatch, dying, lambda thread: thread._stopping)
    failure = await _failure_of_a_worker_whose_engine_closes(config, dying)
    assert isinstance(failure, EngineError)
    assert await client.hget(f"{keys.job_state}{keys.run}:a", "shared") == b"1"
    assert await client.exists(f"{ARQ_RUNNING}{keys.run}:a") == 0


async def _failure_of_a_worker_whose_engine_closes(config: Config, dying: HfBackend) -> BaseException | None:
    try:
        async with working(config, dying) as worker:

            async def running() -> bool:
                return worker._slots.running > 0  # held, and its prompt is rendered

            async def failed() -> bool:
                return worker.leases.broken is not None

            await eventually(running, "a running sequence")
            await dying.close()
            await eventually(failed, "the failure")
    except (EngineError, BaseExceptionGroup) as error:
        return first_cause(error)
    return None


async def test_a_model_without_template_costs_only_the_jobs_that_need_one(
    config: Config, backend: HfBackend, source: Path, client: Any, keys: Keys, tmp_path: Path
) -> None:
    bare = shutil.copytree(source, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    config = msgspec.structs.replace(config, model=ModelConfig(path=str(bare)))
    jobs = [decode_job(f"{keys.run}:{name}") for name in ("a", "b")]
    jobs.append(decode_job(f"{keys.run}:good", messages=[], prompt_token_ids=TokenArray([7, 8])))
    await JobQueue(client, keys).enqueue(jobs, PLENTY)
    async with working(config, backend):
        await eventually(lambda: ends(client, keys, 3), "the end of all jobs")
    now = await snapshot(client, keys)
    assert (now.committed, now.reasons) == (1, {"dead:invalid_request": 2})


async def test_many_refusals_at_once_all_arrive(config: Config, backend: HfBackend, client: Any, keys: Keys) -> None:
    unknown = TokenArray([10**6])
    jobs = [decode_job(f"{keys.run}:{i}", messages=[], prompt_token_ids=unknown, n=3) for i in range(30)]
    await JobQueue(client, keys).enqueue(jobs, PLENTY)
    async with working(config, backend):
        await eventually(lambda: ends(client, keys, 90), "the end of all jobs")
    now = await snapshot(client, keys)
    assert (now.reasons, now.redelivered_jobs) == ({"dead:invalid_request": 90}, 0)


async def ends(client: Any, keys: Keys, count: int) -> bool:
    now = await snapshot(client, keys)
    return now.committed + now.dead == count


async def test_a_late_drop_leaves_the_newer_attempt_in_the_keepers_hands(
    config: Config, client: Any, keys: Keys
) -> None:
    keeper = LeaseKeeper(config, JobQueue(client, keys), time.monotonic, lambda job_id, attempt: None)
    keeper.hold(Claim(job_id="a", attempt=2, enqueued_at=0.0))
    keeper.drop("a", 1)
    assert keeper.held() == ["a"]
    keeper.drop("a", 2)
    assert keeper.held() == []
