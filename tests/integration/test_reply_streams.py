"""Deltas to callers against a real broker: what is stored, in order, whatever gets lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from sluice.pipeline.errors import ResultsChanged
from sluice.pipeline.queue.replies import Replies
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from tests.asking import Asked, events, reading


@pytest.fixture
async def replies(client: Redis, keys: Keys) -> AsyncIterator[Replies]:
    async with reading(client, keys) as one:
        yield one


@pytest.fixture
def asked(client: Redis, keys: Keys) -> Asked:
    return Asked(client, keys)


async def test_deltas_are_what_is_stored_without_gaps_or_repeats(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies, stream_every=1)
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        claim = await asked.claim()
        outcomes = [await asked.store(claim, *piece) for piece in ((0, 7), (0, 7), (2, 9), (1, 8), (0, 7))]
        assert outcomes == ["ok", "ok", "gap", "ok", "ok"]
        assert await events(expected, lambda tokens: len(tokens) >= 2) == ([7, 8], [])
        await asked.commit(claim)  # 7 8 9
        tokens, ends = await events(expected, at=2)
    assert (tokens, [type(end) for end in ends]) == ([9], [SequenceResult])
    await asked.assert_balanced(replied=1, enqueued=0)


async def test_deltas_that_got_lost_come_from_what_is_stored(asked: Asked, replies: Replies) -> None:
    job = asked.job("a", replies, stream_every=1)
    await asked.enqueue(job)
    claim = await asked.claim()
    await asked.store(claim, 0, 7)
    with replies.expect(job.job_id) as expected:  # too late for the first
        await asked.store(claim, 1, 8)
        assert await events(expected, lambda tokens: len(tokens) >= 2) == ([7, 8], [])
        await asked.commit(claim)
        assert (await events(expected, at=2))[0] == [9]


async def test_a_stream_goes_on_for_another_process(asked: Asked, replies: Replies, client: Redis, keys: Keys) -> None:
    await asked.enqueue(asked.job("a", replies, stream_every=1))
    claim = await asked.claim()
    await asked.store(claim, 0, 7)
    async with reading(client, keys) as second:
        again = asked.job("a", second, stream_every=1)
        with second.expect(again.job_id) as expected:
            assert await asked.enqueue(again) == "duplicate"
            assert await events(expected, lambda tokens: len(tokens) >= 1) == ([7], [])
            await asked.store(claim, 1, 8)
            assert await events(expected, lambda tokens: len(tokens) >= 1, at=1) == ([8], [])
            await asked.commit(claim)
            tokens, ends = await events(expected, at=2)
    assert (tokens, len(ends)) == ([9], 1)


async def test_an_attempt_that_decodes_other_tokens_is_an_error_in_a_stream_and_the_result_counts(
    asked: Asked, replies: Replies
) -> None:
    job = asked.job("a", replies, stream_every=1)
    with replies.expect(job.job_id) as expected:
        await asked.enqueue(job)
        claim = await asked.claim()
        await asked.store(claim, 0, 1, 2)
        assert (await events(expected, lambda tokens: len(tokens) >= 2))[0] == [1, 2]
        await asked.store(claim, 0, 1, 3, 4)
        await asked.commit(claim)
        with pytest.raises(ResultsChanged, match="decoded anew"):
            await events(expected, at=2)
        [end] = await expected.ended()
    assert isinstance(end, SequenceResult)
    assert list(end.token_ids) == [7, 8, 9]
