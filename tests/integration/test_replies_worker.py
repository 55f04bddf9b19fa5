"""Answers to callers by the queue worker with the real engine: streams over lost workers, cancelled sequences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from arq.connections import create_pool
from redis.asyncio import Redis

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.queue import NO_LIMIT, arq_deserializer, arq_redis_settings, arq_serializer
from sluice.pipeline.queue.replies import Replies
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, DecodeJob, SamplingParams, SequenceResult
from sluice.workers.engine.hf import HfBackend
from tests.asking import Asked, answer, events, reading
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.integration.test_decode_worker import changed
from tests.roles import eventually, run_config
from tests.tiny_models import save_tiny_model

LONG = SamplingParams(temperature=0.0, max_new_tokens=48)  # greedy does not end by itself here


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=2) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"lease_s": 60.0, "renew_s": 0.5, "poll_s": 0.05, "max_batch": 2, "drain_s": 0.0}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})


@pytest.fixture
async def replies(client: Redis, keys: Keys) -> AsyncIterator[Replies]:
    async with reading(client, keys) as one:
        yield one


@pytest.fixture
def asked(client: Redis, keys: Keys) -> Asked:
    return Asked(client, keys)


def many(count: int) -> Any:
    return lambda tokens: len(tokens) >= count


async def interrupted(
    asked: Asked, replies: Replies, config: Config, backend: HfBackend, job: DecodeJob, *, reaped: bool
) -> tuple[list[int], SequenceResult]:
    """The tokens of the stream and the result of a job whose first worker is lost after 8 tokens."""
    with replies.expect(job.job_id) as expected:
        async with working(config, backend, "first") as first:
            await asked.enqueue(job)
            seen, ends = await events(expected, many(8))
            if reaped and not ends:  # it works on, and what it stores is refused
                await asked.queue.reap(first.leases.queue.owner)
                async with working(config, backend, "second"):
                    more, ends = await events(expected, at=len(seen))
                    return seen + more, result_in(ends)
        async with working(config, backend, "second"):
            more, ends = await events(expected, at=len(seen))
    return seen + more, result_in(ends)


def result_in(ends: list[Any]) -> SequenceResult:
    [end] = ends
    assert isinstance(end, SequenceResult)
    return end


@pytest.mark.parametrize("reaped", [False, True], ids=["handed back", "declared dead"])
async def test_a_stream_is_whole_when_its_worker_is_lost(
    asked: Asked, replies: Replies, config: Config, backend: HfBackend, reaped: bool
) -> None:
    for name in "abcdefgh":  # one that ended before its worker was lost proves nothing
        job = asked.job(name, replies, stream_every=2, sampling=LONG, rollout_id="r", turn=3)
        tokens, result = await interrupted(asked, replies, config, backend, job, reaped=reaped)
        assert tokens == list(result.token_ids)
        await replies.forget(job.job_id)
        if result.attempt > 1:
            break
    assert result.attempt > 1
    assert result.resumed_tokens >= 8
    assert (result.rollout_id, result.turn, result.reply_to) == ("r", 3, replies.name)
    whole = msgspec.structs.replace(job, stream_every=0)
    with replies.expect(job.job_id) as expected:
        async with working(config, backend):
            await asked.enqueue(whole)
            assert list(result_in(await answer(expected)).token_ids) == tokens
    counted = await asked.counted()
    await asked.assert_balanced(enqueued=0, dead=0, replied=counted["replied"])


async def test_a_running_sequence_is_cancelled_on_a_full_worker(
    asked: Asked, replies: Replies, config: Config, backend: HfBackend
) -> None:
    config = changed(config, renew_s=30.0, lease_s=100.0)  # its claims have to find it, not its renewals
    long = msgspec.structs.replace(LONG, max_new_tokens=200)
    async with working(config, backend) as worker:
        for name in "abcdefgh":  # one that ended before it was cancelled proves nothing
            job, other = (asked.job(name + at, replies, stream_every=2, sampling=long) for at in "12")
            with replies.expect(job.job_id) as expected, replies.expect(other.job_id) as unharmed:
                await asked.queue.enqueue([job, other], NO_LIMIT)
                await events(expected, many(1))
                await asked.queue.cancel([job.job_id])
                [end], [result] = await answer(expected), await answer(unharmed)
            assert isinstance(result, SequenceResult)
            if isinstance(end, DeadLetter):
                break
        assert isinstance(end, DeadLetter)
        assert (end.reason, end.state) == ("cancelled", "dropped")

        async def let_go() -> bool:
            return job.job_id not in worker.held()

        await eventually(let_go, "the worker to let go of what was cancelled")
    await asked.assert_balanced(enqueued=0, dropped=0, dead=0)


async def test_an_invalid_request_is_answered(
    asked: Asked, replies: Replies, config: Config, backend: HfBackend
) -> None:
    job = asked.job("a", replies, sampling=SamplingParams(max_new_tokens=100_000))
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        async with working(config, backend):
            [end] = await answer(expected)
    assert isinstance(end, DeadLetter)
    assert end.reason == "invalid_request"
    await asked.assert_balanced(enqueued=0, dead=0, replied=1)


async def test_a_program_that_knows_only_arq_is_answered_too(
    asked: Asked, replies: Replies, config: Config, backend: HfBackend, keys: Keys
) -> None:
    pool = await create_pool(
        arq_redis_settings(config.broker.url or ""),
        job_serializer=arq_serializer,
        job_deserializer=arq_deserializer,
        default_queue_name=keys.jobs,
    )
    fields = {"messages": [{"role": "user", "content": "hello"}], "n": 2, "sampling": {"max_new_tokens": 8}}
    job_id = f"{keys.run}:foreign"
    with replies.expect(job_id, 2) as expected:
        job = await pool.enqueue_job("decode", **fields, reply_to=replies.name, _job_id=job_id)
        async with working(config, backend):
            ends = await answer(expected)
            assert job is not None
            assert await job.result(timeout=HANG_S, poll_delay=0.01) == {"committed": 2}
    await pool.aclose(close_connection_pool=True)
    assert [end.seq_id for end in ends if isinstance(end, SequenceResult)] == [f"{job_id}:0", f"{job_id}:1"]
    await asked.assert_balanced(enqueued=0, replied=2)
