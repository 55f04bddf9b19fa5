"""Answers to callers against a real broker: nothing in the training stream, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker import connection
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError, ResultsLost
from sluice.pipeline.queue.dead_letters import DeadLetters, Selection
from sluice.pipeline.queue.replies import Replies
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult
from tests.asking import Asked, answer, events, reading
from tests.factories import decode_job
from tests.killable_broker import KillableBroker
from tests.roles import eventually


@pytest.fixture
async def replies(client: Redis, keys: Keys) -> AsyncIterator[Replies]:
    async with reading(client, keys) as one:
        yield one


@pytest.fixture
def asked(client: Redis, keys: Keys) -> Asked:
    return Asked(client, keys)


async def test_results_go_to_the_caller_alone_and_once(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies, n=2)
    with replies.expect(job.job_id, 2) as expected:
        assert await asked.enqueue(job) == "enqueued"
        claim = await asked.claim()
        assert [await asked.commit(claim, index, 2) for index in (1, 0, 0)] == ["ok", "ok", "dup"]
        assert [end.seq_id for end in await answer(expected)] == [f"{job.job_id}:0", f"{job.job_id}:1"]
    await asked.assert_balanced(replied=2, enqueued=0, dead=0)


async def test_who_asks_for_the_same_job_later_is_given_the_same_answer(
    asked: Asked, replies: Replies, client: Redis, keys: Keys
) -> None:
    async with reading(client, keys) as second:
        first_job, again = asked.job("a", replies), asked.job("a", second)
        with replies.expect(again.job_id) as first, second.expect(again.job_id) as other:
            assert [await asked.enqueue(job) for job in (first_job, again)] == ["enqueued", "duplicate"]
            await asked.commit(await asked.claim())
            assert await answer(first) == await answer(other)
        with second.expect(again.job_id) as late:
            assert await asked.enqueue(again) == "done"
            [end] = await answer(late)
    assert isinstance(end, SequenceResult)
    await asked.assert_balanced(replied=1, enqueued=0)


async def test_a_job_that_dies_answers_for_what_is_missing_and_leaves_no_tombstone(
    asked: Asked, replies: Replies
) -> None:
    job = asked.job("a", replies, n=2)
    with replies.expect(job.job_id, 2) as expected:
        await asked.enqueue(job)
        claim = await asked.claim()
        await asked.commit(claim, 0, 2)
        assert await asked.queue.fail(claim, "invalid_request", "no") == 1
        good, bad = await answer(expected)
    assert isinstance(good, SequenceResult)
    assert isinstance(bad, DeadLetter)
    assert (bad.seq_id, bad.reason, bad.state) == (f"{job.job_id}:1", "invalid_request", "dead")
    await asked.assert_balanced(replied=1, enqueued=1, dead=1)


async def test_a_replayed_letter_of_a_caller_does_not_become_training_data(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies)
    await asked.enqueue(job)
    await asked.queue.fail(await asked.claim(), "invalid_request", "no")
    letters = DeadLetters(asked.client, Config(run=asked.keys.run))
    [done] = await letters.replay(Selection(everything=True))
    assert done.new_job_id is not None
    with replies.expect(done.new_job_id) as expected:
        assert await asked.commit(await asked.claim()) == "ok"
        assert isinstance((await answer(expected))[0], SequenceResult)
    await asked.assert_balanced(replied=1, enqueued=1, dead=1)


async def test_a_queued_job_is_cancelled_at_the_next_claim(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies)
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        assert await asked.queue.cancel([job.job_id, f"{asked.keys.run}:unknown"]) == 1
        got = await asked.queue.claim(0, 30, 3)
        [end] = await answer(expected)
    assert (got.claims, got.over) == ([], 1)
    assert isinstance(end, DeadLetter)
    assert (end.reason, end.state) == ("cancelled", "dropped")
    assert await asked.queue.cancel([job.job_id]) == 0, "it is over"
    await asked.assert_balanced(enqueued=0, dropped=0, replied=1)


async def test_what_was_forgotten_may_be_asked_again(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies)
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        await replies.forget(job.job_id)  # under way: nothing happens
        await asked.commit(await asked.claim())
        await answer(expected)
    assert await asked.enqueue(job) == "done"
    await replies.forget(job.job_id)
    assert await asked.client.keys(asked.keys.replies + job.job_id + "*") == []
    assert await asked.enqueue(job) == "enqueued"


async def test_what_the_mailbox_says_of_a_forgotten_job_is_no_answer_to_the_next_one(
    asked: Asked, client: Redis, keys: Keys
) -> None:
    """A caller can learn of an end from the store, before the mailbox is read."""
    replies = Replies(client, keys)
    job, other = asked.job("a", replies, stream_every=1), asked.job("b", replies)
    with replies.expect(other.job_id) as unharmed:
        await asked.enqueue(job)
        await asked.store(await asked.claim(), 0, 50, 51)
        await asked.queue.cancel([job.job_id])
        await asked.queue.claim(0, 30, 3)
        with replies.expect(job.job_id) as expected:
            [end] = await answer(expected)
        assert isinstance(end, DeadLetter)
        await asked.enqueue(other)
        await asked.commit(await asked.claim())
        await replies.forget(job.job_id)
        assert not unharmed.missing(), "what is heard with it is its caller's as ever"
        with replies.expect(job.job_id) as again:
            assert await asked.enqueue(job) == "enqueued"
            again.is_asked = True  # as the gateway says: its answer can't exist yet
            await asked.commit(await asked.claim())
            async with reading(client, keys, replies):
                tokens, [result] = await events(again)
    assert isinstance(result, SequenceResult)
    assert tokens == list(result.token_ids)
    await asked.assert_balanced(replied=3, enqueued=0)


async def test_a_job_that_the_broker_lost_can_be_enqueued_again(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies, n=2)
    with replies.expect(job.job_id, 2) as expected:
        await asked.enqueue(job)
        waiting = asyncio.create_task(answer(expected))
        await asyncio.sleep(0)
        await asked.client.delete(ARQ_JOB + job.job_id, asked.keys.job_state + job.job_id)
        await asked.client.zrem(asked.keys.jobs, job.job_id)
        with pytest.raises(ResultsLost, match=job.job_id):
            await waiting
        assert await asked.enqueue(job) == "enqueued"
        claim = await asked.claim()
        assert [await asked.commit(claim, index, 2) for index in (0, 1)] == ["ok", "ok"]
        assert len(await answer(expected)) == 2


async def test_a_reply_that_ran_out_is_lost_too(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies)
    await asked.enqueue(job)
    await asked.commit(await asked.claim())
    await asked.client.delete(f"{asked.keys.replies}{job.job_id}:0")
    with replies.expect(job.job_id) as expected:
        assert await asked.enqueue(job) == "done"
        with pytest.raises(ResultsLost):
            await answer(expected)
        assert await asked.enqueue(job) == "enqueued", "it would be refused for ever"


async def test_whoever_waits_is_told_when_nothing_is_read_any_more(asked: Asked, client: Redis, keys: Keys) -> None:
    async with contextlib.AsyncExitStack() as stack:
        replies = await stack.enter_async_context(reading(client, keys))
        job = asked.job("a", replies)
        with replies.expect(job.job_id) as expected:
            await asked.enqueue(job)
            waiting = asyncio.create_task(answer(expected))
            await eventually(lambda: _is(expected.is_asked), "the wait to begin")
            await stack.aclose()
            with pytest.raises(BrokerError, match="no longer reads replies"):
                await waiting


async def _is(value: bool) -> bool:
    return value


async def test_junk_under_the_names_of_replies_stops_nobody(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies, stream_every=1)
    await asked.client.rpush(f"{asked.keys.replies}mailbox:{replies.name}", b"\x81junk", b"\xff\xff", b"", b"other:0")
    name = f"{job.job_id}:0".encode()
    odd = [b"\xc1", b"\xc19:", b"\xc1" + b"9" * 5000, b"\xc1%d:%sjunk" % (len(name), name)]
    await asked.client.rpush(f"{asked.keys.replies}mailbox:{replies.name}", *odd)
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        await asked.commit(await asked.claim())
        assert len(await answer(expected)) == 1
    await asked.client.set(f"{asked.keys.replies}mailbox:odd", "not a list")
    await asked.enqueue(decode_job(f"{asked.keys.run}:odd", reply_to="odd"))
    assert await asked.commit(await asked.claim()) == "ok"


async def test_an_outage_is_outlasted_and_what_the_broker_lost_is_told(tmp_path: Path, keys: Keys) -> None:
    server = KillableBroker(tmp_path)
    server.start()
    client = connection.connect(BrokerConfig(url=server.url, retry_for_s=60))
    asked = Asked(client, keys)
    try:
        async with reading(client, keys) as replies:
            kept, lost = asked.job("kept", replies), asked.job("lost", replies)
            with replies.expect(kept.job_id) as first, replies.expect(lost.job_id) as second:
                await asked.enqueue(kept)
                waiting = asyncio.create_task(answer(first))
                await eventually(lambda: _is(first.is_asked), "the wait to begin")
                server.kill()
                server.start()
                await asked.commit(await asked.claim())
                assert [end.seq_id for end in await waiting] == [f"{kept.job_id}:0"]
                await asked.enqueue(lost)
                server.kill()
                shutil.rmtree(tmp_path / "appendonlydir", ignore_errors=True)
                (tmp_path / "appendonly.aof").unlink(missing_ok=True)  # Redis 6.2's
                server.start()
                with pytest.raises(ResultsLost):
                    await answer(second)
                assert await asked.enqueue(lost) == "enqueued"
                await asked.commit(await asked.claim())
                assert [end.seq_id for end in await answer(second)] == [f"{lost.job_id}:0"]
    finally:
        await client.aclose()
        server.kill()


async def test_a_mailbox_that_nobody_reads_stays_small_and_runs_out(asked: Asked) -> None:
    mailbox = f"{asked.keys.replies}mailbox:full"
    await asked.client.rpush(mailbox, *["old"] * 10_005)
    await asked.enqueue(decode_job(f"{asked.keys.run}:a", reply_to="full"))
    await asked.commit(await asked.claim())
    assert await asked.client.llen(mailbox) == 10_000
    assert await asked.client.lindex(mailbox, -1) == f"{asked.keys.run}:a:0".encode()
    for key in (mailbox, f"{asked.keys.replies}{asked.keys.run}:a:0"):
        assert 0 < await asked.client.pttl(key) <= 600_000
