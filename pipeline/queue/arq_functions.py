"""Plain arq functions, called with arq's context, hooks, timeout and retries; each call has one ending.

| a call that …                            | ends as                                              |
|------------------------------------------|------------------------------------------------------|
| returns                                  | arq's result, fenced                                 |
| raises Retry, fewer than max_tries       | ready again after its delay (else growing, jittered) |
| cancels itself, or raises RetryJob       | ready again                                          |
| raises, times out, or retries too often  | dead letter with the traceback, arq's failed result  |
| is aborted by its caller                 | dropped(cancelled), by the script                    |
| is cut off by a stop or a lost lease     | ready again; no try is used up                       |

Time limits are checked once a turn of the worker: a timer for each would cost more than a short job does.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from typing import TYPE_CHECKING, Any, cast

import msgspec
from arq.jobs import serialize_result
from arq.utils import ms_to_datetime
from arq.worker import Retry, RetryJob

from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.envelope import arq_serializer
from sluice.pipeline.queue.types import Called, Claim

if TYPE_CHECKING:
    from sluice.pipeline.queue.leased_worker import LeasedWorker


class Calls:
    """The running calls, by job id."""

    def __init__(self, worker: LeasedWorker) -> None:
        self._worker = worker
        self._running: dict[str, Claim] = {}
        self._limits: dict[str, float] = {}  # job id → monotonic seconds
        self._overdue: set[str] = set()
        self._told: set[str] = set()  # the function has ended, and its ending is being recorded

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._running

    async def accept(self, claim: Claim) -> None:
        """Start one; what cannot be called is a dead letter."""
        worker = self._worker
        if not claim.problem and claim.function not in worker.functions:
            known = ", ".join(worker.served())
            await fail(worker, claim, "unknown_function", f"{claim.function!r}; this worker serves {known}")
        elif claim.problem:
            await fail(worker, claim, claim.reason, claim.problem)
        else:
            self._running[claim.job_id] = claim
            self._told.discard(claim.job_id)
            limit_s = limit_of(worker, claim)
            if limit_s is not None:
                self._limits[claim.job_id] = time.monotonic() + limit_s
            task = worker.loop.create_task(run_call(worker, claim, self))
            worker.tasks[claim.job_id] = task
            task.add_done_callback(lambda ended: self._ended(claim, ended))

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel one; False if it is not running here."""
        claim = self._running.get(job_id)
        if claim is None or attempt not in (None, claim.attempt):
            return False
        del self._running[job_id]
        if job_id in self._told:  # it is ready again already; the answer to that is still on its way
            return False
        self._worker.tasks[job_id].cancel()
        self._worker.jobs_failed += 1
        return True

    def take_back(self) -> list[Claim]:
        """Cancel all; their claims."""
        claims = list(self._running.values())
        self._running.clear()
        for claim in claims:
            if task := self._worker.tasks.get(claim.job_id):
                task.cancel()
        self._worker.jobs_retried += len(claims)
        return claims

    def end_overdue(self) -> None:
        """Cancel those that are out of time."""
        now = time.monotonic()
        for job_id in [job_id for job_id, limit in self._limits.items() if limit < now]:
            del self._limits[job_id]
            self._overdue.add(job_id)
            self._worker.tasks[job_id].cancel()

    def lift_limit(self, claim: Claim) -> None:
        """The function has ended: what records its ending takes the time it takes."""
        self._limits.pop(claim.job_id, None)
        self._told.add(claim.job_id)

    def has(self, claim: Claim) -> bool:
        """It runs here, and was not lost or given back."""
        return self._running.get(claim.job_id) is claim

    def is_overdue(self, claim: Claim) -> bool:
        """It was cancelled for its time."""
        return claim.job_id in self._overdue

    def _ended(self, claim: Claim, task: asyncio.Task[None]) -> None:
        if self._worker.tasks.get(claim.job_id) is task:
            del self._worker.tasks[claim.job_id]
            self._limits.pop(claim.job_id, None)
            self._overdue.discard(claim.job_id)
            self._told.discard(claim.job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._worker.broken = error  # its job stays held, to be handed back with blame
            self._worker.wake.set()
        elif self.has(claim):
            del self._running[claim.job_id]
            self._worker.ended(claim)


_BACKOFF_S, _BACKOFF_CAP_S = 0.5, 30.0
_CRON_KEPT_MS = 60_000  # a cron job's own id blocks the next call for no longer, as in arq
FOR_EVER = -1


class Ending(msgspec.Struct, frozen=True):
    """How a call ended: with a value, with `again_s` until it is ready again, or with a failure."""

    value: Any = None
    again_s: float | None = None
    failure: tuple[str, str, str] | None = None  # reason, detail, traceback


def backoff_s(attempt: int) -> float:
    """Exponential with jitter: 0.25 to 0.5 s after the first attempt, at most 30 s."""
    return random.uniform(0.5, 1.0) * min(_BACKOFF_CAP_S, _BACKOFF_S * 2 ** min(attempt - 1, 16))


def limit_of(worker: LeasedWorker, claim: Claim) -> float | None:
    """Seconds that the call may take."""
    limit = cast(Any, worker.functions[claim.function]).timeout_s
    return worker.job_timeout_s if limit is None else limit


async def run_call(worker: LeasedWorker, claim: Claim, calls: Calls) -> None:
    """Call it and record its ending."""
    started, ctx = time.time(), {**worker.ctx, **_facts(claim)}
    try:
        ending = await _attempt(worker, claim, ctx)
    except asyncio.CancelledError as cut:
        if not calls.has(claim):
            await _hooks(worker, ctx)
            raise
        ending = _again(worker, claim, 0.0, "it cancelled itself")
        if calls.is_overdue(claim):
            late = TimeoutError(f"not done in {limit_of(worker, claim)} s")
            late.__cause__ = cut
            ending = Ending(failure=("failed", repr(late), "".join(traceback.format_exception(late))))
    calls.lift_limit(claim)
    if worker.on_job_end:
        ending = await _end_hook(worker, ctx, ending)
    await _record(worker, claim, ending, started)
    if worker.after_job_end:
        await worker.committer.flush()
        await worker.after_job_end(ctx)


async def fail(worker: LeasedWorker, claim: Claim, reason: str, detail: str, trace: str = "") -> None:
    """The job is a dead letter."""
    worker.jobs_failed += 1
    worker.keeper.drop(claim.job_id, claim.attempt)
    get_logger().error("job failed", job=claim.job_id, reason=reason, detail=detail)
    await worker.queue.fail(claim, reason, detail, trace)


async def _attempt(worker: LeasedWorker, claim: Claim, ctx: dict[Any, Any]) -> Ending:
    function = cast(Any, worker.functions[claim.function])
    most = worker.max_tries if function.max_tries is None else function.max_tries
    if _tries(claim) > most:
        return Ending(failure=("max_tries", f"{most} attempts were not enough", ""))
    try:
        if worker.on_job_start:
            await worker.on_job_start(ctx)
        return Ending(await function.coroutine(ctx, *claim.args, **claim.kwargs))
    except (Retry, RetryJob) as again:
        score_ms = cast("int | None", getattr(again, "defer_score", None))
        delay_s = score_ms / 1000 if score_ms else backoff_s(claim.attempt) if isinstance(again, Retry) else 0.0
        return _again(worker, claim, delay_s, repr(again))
    except Exception as error:  # the user's code: its failure is this job's, and goes into the dead letter
        return Ending(failure=("failed", repr(error), traceback.format_exc()))


def _again(worker: LeasedWorker, claim: Claim, delay_s: float, why: str) -> Ending:
    if worker.retry_jobs:
        return Ending(again_s=delay_s)
    return Ending(failure=("failed", f"{why}; this worker does not retry (attempt {claim.attempt})", ""))


async def _end_hook(worker: LeasedWorker, ctx: dict[Any, Any], ending: Ending) -> Ending:
    try:
        await cast(Any, worker.on_job_end)(ctx)
    except Exception as error:  # the user's code, as above
        return Ending(failure=("failed", f"on_job_end: {error!r}", traceback.format_exc()))
    return ending


async def _hooks(worker: LeasedWorker, ctx: dict[Any, Any]) -> None:
    for hook in (worker.on_job_end, worker.after_job_end):
        if hook:
            await hook(ctx)


async def _record(worker: LeasedWorker, claim: Claim, ending: Ending, started: float) -> None:
    if ending.failure is not None:
        await fail(worker, claim, *ending.failure)
    elif ending.again_s is not None:
        worker.jobs_retried += 1
        worker.keeper.drop(claim.job_id, claim.attempt)
        await worker.queue.release([claim], ending.again_s, excused=False)
    else:
        worker.jobs_complete += 1
        answer = _answer(worker, claim, started, ending.value)
        worker.committer.put(Called(claim, answer, _kept_ms(worker, claim)))


def _kept_ms(worker: LeasedWorker, claim: Claim) -> int | None:
    """How long arq's result stays; None for as long as the worker says."""
    function = cast(Any, worker.functions[claim.function])
    if hasattr(function, "next_run"):
        kept_s = worker.keep_result_s if function.keep_result_s is None else function.keep_result_s
        return max(1, min(_CRON_KEPT_MS, int((kept_s or 60.0) * 1000)))
    for_ever = function.keep_result_forever
    if worker.keep_result_forever if for_ever is None else for_ever:
        return FOR_EVER
    return None if function.keep_result_s is None else int(function.keep_result_s * 1000)


def _answer(worker: LeasedWorker, claim: Claim, started: float, value: Any) -> bytes:
    times = int(started * 1000), int(time.time() * 1000)
    answer = serialize_result(
        claim.function,
        tuple(claim.args),
        claim.kwargs,
        _job_try(claim),
        int(claim.enqueued_at * 1000),
        True,
        value,
        *times,
        claim.job_id,
        worker.queue_name,
        claim.job_id,
        serializer=arq_serializer,
    )
    return answer or b""


def _job_try(claim: Claim) -> int:
    """The number that arq tells the function; a caller may begin at a later one."""
    return claim.first_try + claim.attempt - 1


def _tries(claim: Claim) -> int:
    """Those that count: not what was handed back or lost."""
    return _job_try(claim) - claim.excused


def _facts(claim: Claim) -> dict[str, Any]:
    """What arq tells a function of its job."""
    enqueued_ms = int(claim.enqueued_at * 1000)
    return {
        "job_id": claim.job_id,
        "job_try": _job_try(claim),
        "enqueue_time": ms_to_datetime(enqueued_ms),
        "score": enqueued_ms,
    }
