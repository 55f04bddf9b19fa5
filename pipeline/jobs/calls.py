"""Plain arq functions on a LeasedWorker: called with arq's context, timeout and retries, each with one ending.

| a call that …                        | ends as                                              |
|--------------------------------------|------------------------------------------------------|
| returns                              | arq's result, fenced                                 |
| raises Retry, fewer than max_tries   | ready again after its delay (else growing, jittered) |
| raises, times out, or retries too often | dead letter with the traceback, arq's failed result |
| is aborted by its caller             | dropped(cancelled), by the script                    |
| is cut off by a stop or a lost lease | ready again                                          |
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from typing import TYPE_CHECKING, Any, cast

from arq.jobs import serialize_result
from arq.utils import ms_to_datetime
from arq.worker import Retry

from pipeline.jobs.envelope import arq_serializer
from pipeline.jobs.types import Called, Claim
from pipeline.logs import get_logger

if TYPE_CHECKING:
    from pipeline.jobs.worker import LeasedWorker

_BACKOFF_S, _BACKOFF_CAP_S = 0.5, 30.0


def backoff_s(attempt: int) -> float:
    """Exponential with jitter: 0.25 to 0.5 s after the first attempt, at most 30 s."""
    return random.uniform(0.5, 1.0) * min(_BACKOFF_CAP_S, _BACKOFF_S * 2 ** min(attempt - 1, 16))


class Calls:
    """The calls that run now, by job id."""

    def __init__(self, worker: LeasedWorker) -> None:
        self._worker = worker
        self._running: dict[str, tuple[Claim, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._running

    async def accept(self, claim: Claim) -> None:
        """Start one; what cannot be called is a dead letter."""
        worker = self._worker
        if not claim.problem and claim.function not in worker.functions:
            known = ", ".join(worker.served())
            await self._fail(claim, "unknown_function", f"{claim.function!r}; this worker serves {known}")
        elif claim.problem:
            await self._fail(claim, claim.reason, claim.problem)
        else:
            task = worker.loop.create_task(self._run(claim))
            self._running[claim.job_id] = claim, task
            task.add_done_callback(lambda ended: self._ended(claim, ended))

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel one; False if it is not running here."""
        claim, task = self._running.get(job_id, (None, None))
        if claim is None or task is None or attempt not in (None, claim.attempt):
            return False
        del self._running[job_id]
        task.cancel()
        self._worker.jobs_failed += 1
        return True

    def take_back(self) -> list[Claim]:
        """Cancel all; their claims."""
        claims = [claim for claim, _ in self._running.values()]
        for _, task in self._running.values():
            task.cancel()
        self._running.clear()
        self._worker.jobs_retried += len(claims)
        return claims

    def _ended(self, claim: Claim, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._worker.broken = error
        if self._running.get(claim.job_id, (None, None))[1] is task:
            del self._running[claim.job_id]
            self._worker.ended(claim)

    async def _run(self, claim: Claim) -> None:
        worker, started = self._worker, time.time()
        function = cast(Any, worker.functions[claim.function])
        most = worker.max_tries if function.max_tries is None else function.max_tries
        if claim.attempt > most:
            await self._fail(claim, "max_tries", f"{most} attempts were not enough")
            return
        ctx: dict[Any, Any] = {**worker.ctx, **_facts(claim)}
        try:
            if worker.on_job_start:
                await worker.on_job_start(ctx)
            limit = worker.job_timeout_s if function.timeout_s is None else function.timeout_s
            async with asyncio.timeout(limit):
                value = await function.coroutine(ctx, *claim.args, **claim.kwargs)
            if worker.on_job_end:
                await worker.on_job_end(ctx)
        except Retry as again:
            worker.jobs_retried += 1
            delay_s = (again.defer_score or 0) / 1000 or backoff_s(claim.attempt)
            worker.keeper.drop(claim.job_id)
            await worker.queue.release([claim], delay_s)
        except Exception as error:  # the user's code: its failure is this job's, and goes into the dead letter
            await self._fail(claim, "failed", repr(error), traceback.format_exc())
        else:
            worker.jobs_complete += 1
            worker.committer.put(Called(claim, self._answer(claim, started, value)))
        if worker.after_job_end:
            await worker.after_job_end(ctx)

    async def _fail(self, claim: Claim, reason: str, detail: str, trace: str = "") -> None:
        worker = self._worker
        worker.jobs_failed += 1
        worker.keeper.drop(claim.job_id)
        get_logger().error("job failed", job=claim.job_id, reason=reason, detail=detail)
        await worker.queue.fail(claim, reason, detail, trace)

    def _answer(self, claim: Claim, started: float, value: Any) -> bytes:
        answer = serialize_result(
            claim.function,
            tuple(claim.args),
            claim.kwargs,
            claim.attempt,
            int(claim.enqueued_at * 1000),
            True,
            value,
            int(started * 1000),
            int(time.time() * 1000),
            claim.job_id,
            self._worker.queue_name,
            claim.job_id,
            serializer=arq_serializer,
        )
        return answer or b""


def _facts(claim: Claim) -> dict[str, Any]:
    """What arq tells a function of its job."""
    enqueued_ms = int(claim.enqueued_at * 1000)
    return {
        "job_id": claim.job_id,
        "job_try": claim.attempt,
        "enqueue_time": ms_to_datetime(enqueued_ms),
        "score": enqueued_ms,
    }
