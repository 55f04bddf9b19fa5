"""A process that asks for answers, and a worker that is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from redis.asyncio import Redis

from sluice.pipeline.queue import NO_LIMIT, Claim, Finished, JobQueue, Piece
from sluice.pipeline.queue.replies import End, Expected, Replies
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, Progress, TokenDelta
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.workers.decode_worker import delta_of
from tests.deadlines import HANG_S
from tests.factories import decode_job, sequence_result


@contextlib.asynccontextmanager
async def reading(client: Redis, keys: Keys, replies: Replies | None = None) -> AsyncGenerator[Replies]:
    """A process that asks; the one given starts to read only now."""
    replies = replies or Replies(client, keys)
    running = asyncio.create_task(replies.run())
    try:
        yield replies
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Asked:
    """One process's jobs, and a worker that is played by hand."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys, self.queue = keys, JobQueue(client, keys, worker="w")

    def job(self, name: str, replies: Replies, **changes: Any) -> DecodeJob:
        return decode_job(f"{self.keys.run}:{name}", reply_to=replies.name, **changes)

    async def enqueue(self, job: DecodeJob) -> str:
        [outcome] = await self.queue.enqueue([job], NO_LIMIT)
        return outcome

    async def claim(self) -> Claim:
        [claim] = (await self.queue.claim(1, 30, 3)).claims
        return claim

    async def store(self, claim: Claim, offset: int, *tokens: int, index: int = 0) -> str:
        logprobs, versions = FloatArray([-1.0] * len(tokens)), Runs.of([0] * len(tokens))
        piece = Progress(offset=offset, token_ids=TokenArray(tokens), logprobs=logprobs, versions=versions)
        [outcome] = await self.queue.checkpoint([Piece(claim, index, piece, delta_of(claim, index, piece))])
        return outcome

    async def commit(self, claim: Claim, index: int = 0, size: int = 1) -> str:
        [outcome] = await self.queue.commit([Finished(claim, sequence_result(claim.job_id, index, size))])
        return outcome

    async def counted(self) -> dict[str, int]:
        return {name.decode(): int(value) for name, value in (await self.client.hgetall(self.keys.counts)).items()}

    async def assert_balanced(self, **expected: int) -> None:
        """Nothing in flight, nothing to train on, no byte held that no dead letter holds."""
        counted = await self.counted()
        assert {name: counted.get(name, 0) for name in expected} == expected
        now = await snapshot(self.client, self.keys)
        assert (now.enqueued, now.queued_jobs, now.committed) == (now.ended, 0, 0)
        assert await self.client.exists(self.keys.results + "0") == 0
        rows = await self.client.xrange(self.keys.dead)
        assert counted["bytes"] == sum(len(fields[b"d"]) + len(fields[b"p"]) for _, fields in rows)


async def answer(expected: Expected) -> list[End]:
    async with asyncio.timeout(HANG_S):
        return await expected.ended()


async def events(
    expected: Expected, enough: Callable[[list[int]], bool] = lambda _: False, at: int = 0
) -> tuple[list[int], list[End]]:
    """Tokens from `at` on, and ends; stops early when these tokens are enough."""
    tokens, ends = list[int](), list[End]()
    async with asyncio.timeout(HANG_S):
        async for event in expected.events():
            if isinstance(event, TokenDelta):
                assert event.offset == at + len(tokens), "a gap or a repeat"
                tokens += event.token_ids
                if enough(tokens):
                    break
            else:
                ends.append(event)
    return tokens, ends
