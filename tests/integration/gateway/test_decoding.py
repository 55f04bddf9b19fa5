"""The gateway's waits for decode jobs, with a worker that is played by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.pipeline.queue import Claim
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult, TokenDelta
from sluice.producers.gateway.decoding import Decoding, Event
from tests.asking import Asked, reading
from tests.deadlines import HANG_S
from tests.roles import eventually


async def test_a_cancelled_job_of_which_nothing_was_shown_is_decoded_again(client: Any, keys: Keys) -> None:
    """Its first caller left; the second one came before the worker heard of it, and finds stored tokens."""
    asked, seen, claims = Asked(client, keys), list[Event](), list[Claim]()
    async with reading(client, keys) as replies:
        decoding = Decoding(asked.queue, replies, HANG_S)
        job = asked.job("again", replies)
        await asked.enqueue(job)
        assert await asked.store(await asked.claim(), 0, 5, 6) == "ok"
        await asked.queue.cancel([job.job_id])

        async def listen() -> None:
            async for event in decoding.events(job):
                seen.append(event)

        async def found() -> bool:
            return bool(seen)

        async def claimed() -> bool:
            claims.extend((await asked.queue.claim(1, 30, 3)).claims)
            return bool(claims)

        listening = asyncio.create_task(listen())
        await eventually(found, "the stored tokens to be found")
        await eventually(claimed, "the job to be enqueued again")
        assert await asked.commit(claims[0]) == "ok"
        await asyncio.wait_for(listening, HANG_S)
    assert [type(event) for event in seen] == [TokenDelta, TokenDelta, SequenceResult]


@pytest.mark.parametrize("stream_every", [0, 4])
async def test_so_is_one_of_which_only_some_sequences_ended(client: Any, keys: Keys, stream_every: int) -> None:
    """The first of two has an answer, which is kept; the second's says that it was cancelled."""
    asked, seen, claims = Asked(client, keys), list[Event](), list[Claim]()
    async with reading(client, keys) as replies:
        decoding = Decoding(asked.queue, replies, HANG_S)
        job = asked.job("again", replies, n=2, stream_every=stream_every)
        await asked.enqueue(job)
        assert await asked.commit(await asked.claim(), 0, 2) == "ok"
        await asked.queue.cancel([job.job_id])

        async def cancelled() -> bool:
            await asked.queue.claim(1, 30, 3)
            return await client.exists(f"{keys.replies}{job.job_id}:1") == 1

        async def unread() -> bool:
            return await client.exists(f"{keys.replies}mailbox:{replies.name}") == 0

        async def listen() -> None:
            async for event in decoding.events(job):
                seen.append(event)

        async def claimed() -> bool:
            claims.extend((await asked.queue.claim(1, 30, 3)).claims)
            return bool(claims) or listening.done()

        await eventually(cancelled, "the second sequence to be cancelled")
        await eventually(unread, "the mailbox to be read")
        listening = asyncio.create_task(listen())
        await eventually(claimed, "the job to be enqueued again")
        for claim in claims:
            assert [await asked.commit(claim, index, 2) for index in (0, 1)] == ["ok", "ok"]
        await asyncio.wait_for(listening, HANG_S)
    results = [event.index for event in seen if isinstance(event, SequenceResult)]
    assert sorted(results) == [0, 1]
