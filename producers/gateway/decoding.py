"""Decode jobs of callers waiting for the answer.

| waits for                | unblocked by                                         |
|--------------------------|------------------------------------------------------|
| the next tokens, the end | a worker; `gateway.request_timeout_s` (504 names it) |

- A separate task cancels abandoned jobs and deletes answers that were read, so no caller waits for that.
- Calls with the same job id wait for the same job, or get its answer. A job that was cancelled or timed out before
  its caller saw anything is enqueued again, also if some of its sequences have answers: only streams show them early.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from msgspec.structs import replace
from redis import RedisError

from sluice.pipeline.errors import BrokerError, ResultsLost
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import NO_LIMIT, JobQueue
from sluice.pipeline.queue.replies import End, Expected, Replies
from sluice.pipeline.wire.messages import DeadLetter, DecodeJob, SequenceResult, TokenDelta
from sluice.pipeline.wire.trace import caller
from sluice.producers.gateway.refusals import Refusal, of_letter

Event = TokenDelta | SequenceResult

_MOST_TRIES = 20
_ASIDE_S = 0.02  # the answer goes out before what is done about it
_AGAIN = ("cancelled", "expired")


class Exported(Protocol):
    """Takes the results of a job that was asked for here."""

    def __call__(self, job: DecodeJob, results: Sequence[SequenceResult], /) -> None: ...


class _Again(Exception):
    """The job ended without an answer for an outside reason; it is worth another try."""


class Decoding:
    """The queue as the gateway's calls see it; `run` does what no caller waits for."""

    def __init__(self, queue: JobQueue, replies: Replies, timeout_s: float, exported: Exported | None = None) -> None:
        """`exported` gets the spans of each job that a traced request made."""
        self._queue, self._replies, self._timeout_s, self._exported = queue, replies, timeout_s, exported
        self._waiting = Counter[str]()
        self._later = deque[Callable[[], Awaitable[None]]]()
        self._is_some = asyncio.Event()

    async def run(self) -> None:
        """Cancel abandoned jobs, and delete answers, until cancelled. One that can't be cancelled ends by its deadline,
        and an answer that can't be deleted expires."""
        while True:
            await self._is_some.wait()
            await asyncio.sleep(_ASIDE_S)
            await self.settle()

    async def settle(self) -> None:
        """What is left to do; also at process end."""
        self._is_some.clear()
        while self._later:
            await self._later.popleft()()

    def _put(self, work: Callable[[], Awaitable[None]]) -> None:
        self._later.append(work)
        self._is_some.set()

    async def _cancel(self, job_id: str) -> None:
        if self._waiting[job_id]:  # it was requested again
            return
        try:
            await self._queue.cancel([job_id])
        except (RedisError, BrokerError, OSError) as error:
            get_logger().warning("an abandoned job keeps running until its deadline", job=job_id, error=str(error))

    async def events(self, job: DecodeJob, until: float | None = None) -> AsyncGenerator[Event]:
        """Tokens as they arrive, and each sequence's result, until `until` (monotonic clock; None: the time limit).

        Raises Refusal, BrokerError. Close the generator to stop listening.
        """
        until = until or time.monotonic() + self._timeout_s
        if (asked := caller.get()) is not None:
            job = replace(job, trace=asked.carrier)
        results: list[SequenceResult] = []
        for _ in range(_MOST_TRIES):
            try:
                with self._asked(job) as expected:
                    async with aclosing(self._try(job, expected, until)) as events:
                        async for event in events:
                            if isinstance(event, SequenceResult):
                                results.append(event)
                            yield event
                if self._exported is not None and asked is not None:
                    self._exported(job, results)
                return
            except _Again:
                await self.forget(job)
        raise Refusal(503, f"the sequence was cancelled {_MOST_TRIES} times before it started; try again later")

    async def is_asked_by(self, job: DecodeJob, request: str) -> bool:
        """Whether this job, which its caller named, is of this request, for as long as its answer is kept."""
        return await self._replies.is_asked_by(job.job_id, request, self._timeout_s + self._queue.keep_result_s)

    async def forget(self, job: DecodeJob) -> None:
        """Delete the answer: it is stored elsewhere, or no longer needed."""
        await self._replies.forget(job.job_id, job.n)

    def forget_later(self, job: DecodeJob) -> None:
        """The same, soon: nobody waits for it."""
        self._put(partial(self._forget, job))

    async def _forget(self, job: DecodeJob) -> None:
        try:
            await self.forget(job)
        except (RedisError, BrokerError, OSError) as error:
            get_logger().warning("an answer that was read stays until it expires", job=job.job_id, error=str(error))

    async def _try(self, job: DecodeJob, expected: Expected, until: float) -> AsyncGenerator[Event]:
        began, held = False, list[SequenceResult]()
        while True:
            try:
                [outcome] = await self._queue.enqueue([job], NO_LIMIT)
                if outcome == "enqueued":
                    expected.is_asked = True  # its answer can't exist yet
                async with aclosing(expected.events()) as events:
                    while (event := await _next(events, until)) is not None:
                        if isinstance(event, DeadLetter):
                            if _is_again(event) and not began:
                                raise _Again
                            raise of_letter(event)
                        if job.stream_every and not began:
                            if any(_is_again(one.end) for one in expected.sequences):  # its letter would come too late
                                raise _Again
                            began = True
                        if isinstance(event, SequenceResult) and not job.stream_every:
                            held.append(event)
                        else:
                            yield event
                for result in held:
                    yield result
                return
            except ResultsLost as error:
                get_logger().warning("enqueued again", job=job.job_id, reason=str(error))
            except TimeoutError:
                raise Refusal(504, self._overdue(job)) from None

    @contextlib.contextmanager
    def _asked(self, job: DecodeJob) -> Iterator[Expected]:
        """Listen for the job; if the last listener leaves before its end, it is abandoned."""
        over = False
        self._waiting[job.job_id] += 1
        try:
            with self._replies.expect(job.job_id, job.n) as expected:
                yield expected
            over = True
        except _Again:
            over = True
            raise
        except Refusal as refusal:
            over = refusal.status != 504
            raise
        finally:
            self._waiting[job.job_id] -= 1
            if not self._waiting[job.job_id]:
                del self._waiting[job.job_id]
                if not over:
                    self._put(partial(self._cancel, job.job_id))

    def _overdue(self, job: DecodeJob) -> str:
        return (
            f"no answer within {self._timeout_s:g} s (gateway.request_timeout_s): waited for a worker to decode "
            f"{job.job_id}; check `sluice status` for workers and waiting jobs"
        )


def _is_again(end: End | None) -> bool:
    return isinstance(end, DeadLetter) and end.reason in _AGAIN


async def _next(events: AsyncGenerator[TokenDelta | End], until: float) -> TokenDelta | End | None:
    """The next event, None after the last. Raises TimeoutError."""
    async with asyncio.timeout(max(0.0, until - time.monotonic())):
        return await anext(events, None)
