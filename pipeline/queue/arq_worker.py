"""Plain arq functions on our leases: with arq's context, hooks, options, cron jobs, retries and health record.

| a call that …                            | ends as                                              |
|------------------------------------------|------------------------------------------------------|
| returns                                  | arq's result, fenced                                 |
| raises Retry, fewer than max_tries       | ready again after its delay (else growing, jittered) |
| cancels itself, or raises RetryJob       | ready again                                          |
| raises, times out, or retries too often  | dead letter with the traceback, arq's failed result  |
| is aborted by its caller                 | dropped(cancelled), by the script                    |
| is cut off by a stop or a lost lease     | ready again; no try is used up                       |

- `ArqFunctions` is the Holder; a decode worker has one beside its sequences. `ArqWorker` is a worker of nothing else.
- An `arq.Worker` inside it reads the options, plans the cron jobs and writes the health record. Its loop never runs.
- Time limits are checked once a turn: a timer for each would cost more than a short job does.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
import traceback
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from arq.cron import CronJob
from arq.jobs import serialize_result
from arq.utils import ms_to_datetime
from arq.worker import FailedJobs, Function, Retry, RetryJob, Worker
from redis.asyncio import Redis

from sluice.pipeline.config.types import Config
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.envelope import arq_deserializer, arq_pool, arq_serializer
from sluice.pipeline.queue.leased_worker import Hooks, LeasedWorker
from sluice.pipeline.queue.types import Called, Claim, Claimed
from sluice.pipeline.wire.keys import Keys

_BACKOFF_S, _BACKOFF_CAP_S = 0.5, 30.0
_CRON_KEPT_MS = 60_000  # a cron job's own id blocks the next call no longer than that, as in arq
_CLOSE_S = 5.0
FOR_EVER = -1


class Ending(msgspec.Struct, frozen=True):
    """How a call ended: with a value, with `again_s` until it is ready again, or with a failure."""

    value: Any = None
    again_s: float | None = None
    failure: tuple[str, str, str] | None = None  # reason, detail, traceback


def backoff_s(attempt: int) -> float:
    """Exponential with jitter: 0.25 to 0.5 s after the first attempt, at most 30 s."""
    return random.uniform(0.5, 1.0) * min(_BACKOFF_CAP_S, _BACKOFF_S * 2 ** min(attempt - 1, 16))


def arq_settings(functions: Sequence[Any], client: Redis, keys: Keys, config: Config, **options: Any) -> Worker:
    """An `arq.Worker` over our connections, to read options from; the configuration supplies the defaults."""
    options.setdefault("poll_delay", config.worker.poll_s)
    options.setdefault("keep_result", config.worker.keep_result_s)
    return Worker(
        cast("Sequence[Function]", functions),
        queue_name=keys.jobs,
        redis_pool=arq_pool(client, keys.jobs),
        job_serializer=arq_serializer,
        job_deserializer=arq_deserializer,
        handle_signals=False,
        **options,
    )


@dataclass(eq=False)
class _Call:
    """One attempt at a job; the next one may run beside it until a cancelled function gives in."""

    claim: Claim
    limit: float | None  # monotonic seconds
    task: asyncio.Task[None] | None = None
    is_overdue: bool = False
    has_ended: bool = False  # the function has; its result is being recorded

    def cancel(self) -> None:
        """At its next await."""
        if self.task is not None:
            self.task.cancel()


class ArqFunctions:
    """The Holder of plain calls."""

    def __init__(self, leases: LeasedWorker, arq: Worker, others: Sequence[str] = ()) -> None:
        """`others`: names of functions that another holder of the same worker serves."""
        self._leases, self._arq, self._others = leases, arq, others
        arq.ctx["redis"] = arq.pool
        self._running: dict[str, _Call] = {}  # by job id; an attempt that is lost or given back is no longer here
        self._tasks: set[asyncio.Task[None]] = set()  # of all attempts, until they end

    def room(self) -> int:
        """Calls that may start now."""
        arq = self._arq
        room = arq.max_jobs - len(self._running)
        if arq.burst and arq.max_burst_jobs >= 0:
            room = min(room, arq.max_burst_jobs - self.num_done() - len(self._running))
        return room

    def held(self) -> KeysView[str]:
        """Ids of the running calls."""
        return self._running.keys()

    def served(self) -> list[str]:
        """Names of the functions."""
        return [*self._others, *sorted(self._arq.functions)]

    def num_done(self) -> int:
        """Calls that ended, however they ended."""
        return self._arq.jobs_complete + self._arq.jobs_failed + self._arq.jobs_retried

    async def accept(self, claim: Claim) -> None:
        """Start one; what cannot be called is a dead letter."""
        if not claim.problem and claim.function not in self._arq.functions:
            known = ", ".join(self.served())
            await self._fail(claim, "unknown_function", f"{claim.function!r}; this worker serves {known}")
        elif claim.problem:
            await self._fail(claim, claim.reason, claim.problem)
        else:
            limit_s = self._limit_of(claim)
            call = _Call(claim, None if limit_s is None else time.monotonic() + limit_s)
            self._running[claim.job_id] = call
            call.task = task = asyncio.get_running_loop().create_task(self._run(call))
            self._tasks.add(task)
            self._arq.tasks[claim.job_id] = task
            task.add_done_callback(lambda ended: self._ended(call, ended))

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel one; False if it is not running here."""
        call = self._running.get(job_id)
        if call is None or attempt not in (None, call.claim.attempt):
            return False
        del self._running[job_id]
        if call.has_ended:  # it is back in the queue already; only the script's answer is outstanding
            self._leases.keeper.drop(job_id, call.claim.attempt)
            return False
        call.cancel()
        self._arq.jobs_failed += 1
        return True

    def take_back(self, *, started: bool) -> list[Claim]:
        """Cancel all; their claims. A call starts as soon as it is accepted."""
        calls = list(self._running.values()) if started else []
        for call in calls:
            del self._running[call.claim.job_id]
            call.cancel()
        self._arq.jobs_retried += len(calls)
        return [call.claim for call in calls]

    async def close(self) -> None:
        """Wait for the calls that were cancelled: what they use must outlive them. Logs when that takes too long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        if self._tasks:
            get_logger().error("cancelled functions did not end in time; abandoned", calls=len(self._tasks))

    async def beat(self) -> None:
        """arq's health record, and the cron jobs that are due."""
        await self._arq.heart_beat()

    def end_overdue(self) -> None:
        """Cancel the calls that exceeded their time limit."""
        now = time.monotonic()
        for call in self._running.values():
            if call.limit is not None and call.limit < now:
                call.limit, call.is_overdue = None, True
                call.cancel()

    async def _run(self, call: _Call) -> None:
        """Call it and record its ending."""
        claim, started, arq = call.claim, time.time(), self._arq
        ctx = {**arq.ctx, **_facts(claim)}
        ending = await self._attempt(call, ctx)
        if self._running.get(claim.job_id) is not call:  # lost or given back, whatever it made of its cancellation
            for hook in (arq.on_job_end, arq.after_job_end):
                if hook:
                    await hook(ctx)
            return
        # The function has ended: recording its result is not subject to the limit.
        call.limit, call.has_ended = None, True
        if arq.on_job_end:
            try:
                await arq.on_job_end(ctx)
            except Exception as error:  # the user's code: its failure is this job's, and goes into the dead letter
                ending = Ending(failure=("failed", f"on_job_end: {error!r}", traceback.format_exc()))
        await self._record(claim, ending, started)
        if arq.after_job_end:
            await self._leases.committer.flush()
            await arq.after_job_end(ctx)

    async def _attempt(self, call: _Call, ctx: dict[Any, Any]) -> Ending:
        claim, arq, function = call.claim, self._arq, cast(Any, self._arq.functions[call.claim.function])
        most = arq.max_tries if function.max_tries is None else function.max_tries
        if claim.first_try + claim.tries > most:
            return Ending(failure=("max_tries", f"{most} attempts were not enough", ""))
        try:
            if arq.on_job_start:
                await arq.on_job_start(ctx)
            return Ending(await function.coroutine(ctx, *claim.args, **claim.kwargs))
        except (Retry, RetryJob) as again:
            score_ms = cast("int | None", getattr(again, "defer_score", None))
            delay_s = score_ms / 1000 if score_ms else backoff_s(claim.attempt) if isinstance(again, Retry) else 0.0
            return self._again(claim, delay_s, repr(again))
        except asyncio.CancelledError as cut:
            if not call.is_overdue:
                return self._again(claim, 0.0, "it cancelled itself")
            late = TimeoutError(f"not done within {self._limit_of(claim)} s")
            late.__cause__ = cut
            return Ending(failure=("failed", repr(late), "".join(traceback.format_exception(late))))
        except Exception as error:  # the user's code, as above
            return Ending(failure=("failed", repr(error), traceback.format_exc()))

    def _again(self, claim: Claim, delay_s: float, why: str) -> Ending:
        if self._arq.retry_jobs:
            return Ending(again_s=delay_s)
        return Ending(failure=("failed", f"{why}; this worker does not retry (attempt {claim.attempt})", ""))

    async def _record(self, claim: Claim, ending: Ending, started: float) -> None:
        if ending.failure is not None:
            await self._fail(claim, *ending.failure)
        elif ending.again_s is not None:
            self._arq.jobs_retried += 1
            await self._leases.give_back(claim, ending.again_s, tried=True)
        else:
            self._arq.jobs_complete += 1
            answer = self._answer(claim, started, ending.value)
            self._leases.committer.put(Called(claim, answer, self._kept_ms(claim)))

    async def _fail(self, claim: Claim, reason: str, detail: str, trace: str = "") -> None:
        self._arq.jobs_failed += 1
        get_logger().error("job failed", job=claim.job_id, reason=reason, detail=detail)
        await self._leases.fail(claim, reason, detail, trace)

    def _ended(self, call: _Call, task: asyncio.Task[None]) -> None:
        claim, tasks = call.claim, self._arq.tasks
        self._tasks.discard(task)
        if tasks.get(claim.job_id) is task:
            del tasks[claim.job_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._leases.broke(error)  # its job stays held, to be handed back with blame
        elif self._running.get(claim.job_id) is call:
            del self._running[claim.job_id]
            self._leases.ended(claim)

    def _limit_of(self, claim: Claim) -> float | None:
        """Seconds that the call may take."""
        limit = cast(Any, self._arq.functions[claim.function]).timeout_s
        return self._arq.job_timeout_s if limit is None else limit

    def _kept_ms(self, claim: Claim) -> int | None:
        """How long arq's result stays; None for as long as the worker says."""
        arq, function = self._arq, cast(Any, self._arq.functions[claim.function])
        if isinstance(function, CronJob):
            kept_s = arq.keep_result_s if function.keep_result_s is None else function.keep_result_s
            return max(1, min(_CRON_KEPT_MS, int((kept_s or 60.0) * 1000)))
        for_ever = function.keep_result_forever
        if arq.keep_result_forever if for_ever is None else for_ever:
            return FOR_EVER
        return None if function.keep_result_s is None else int(function.keep_result_s * 1000)

    def _answer(self, claim: Claim, started: float, value: Any) -> bytes:
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
            self._arq.queue_name,
            claim.job_id,
            serializer=arq_serializer,
        )
        return answer or b""


def _job_try(claim: Claim) -> int:
    """arq's `job_try`; a caller may start it at a later number."""
    return claim.first_try + claim.attempt - 1


def _facts(claim: Claim) -> dict[str, Any]:
    """What arq puts into the context of a call."""
    enqueued_ms = int(claim.enqueued_at * 1000)
    return {
        "job_id": claim.job_id,
        "job_try": _job_try(claim),
        "enqueue_time": ms_to_datetime(enqueued_ms),
        "score": enqueued_ms,
    }


class ArqWorker:
    """A worker of plain functions alone: serves one queue until `stop` is set. `options` are those of `arq.Worker`.

    `arq` has the options, counters and cron jobs.
    """

    def __init__(
        self,
        functions: Sequence[Any] = (),
        *,
        client: Redis,
        keys: Keys,
        config: Config,
        name: str = "",
        stop: asyncio.Event | None = None,
        handle_signals: bool = True,
        on_claim: Callable[[Claimed], None] | None = None,
        **options: Any,
    ) -> None:
        """`on_claim` is told what each claim brought."""
        self.arq = arq = arq_settings(functions, client, keys, config, **options)
        self.leases = LeasedWorker(
            client=client,
            keys=keys,
            config=config,
            name=name,
            stop=stop,
            poll_s=arq.poll_delay_s,
            keep_result_s=arq.keep_result_s or 0,
        )
        self._functions, self._on_claim = ArqFunctions(self.leases, arq), on_claim
        self.stop, self.wake = self.leases.stop, self.leases.wake
        self.on_stop: Callable[[signal.Signals], None] | None = None
        if handle_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                arq.loop.add_signal_handler(number, partial(self.handle_sig, number))

    def __repr__(self) -> str:
        return repr(self.arq)

    async def main(self) -> None:
        """Serve until `stop` is set, or in burst mode until the queue is empty or enough was done."""
        arq = self.arq
        if arq.on_startup:
            await arq.on_startup(arq.ctx)
        self.leases.burst = arq.burst
        hooks = Hooks(
            beat=arq.heart_beat,
            after_claim=self._after_claim,
            each_turn=self._functions.end_overdue,
            is_done=lambda: 0 <= arq.max_burst_jobs <= self._functions.num_done(),
        )
        try:
            await self.leases.serve(self._functions, hooks)
        finally:
            await self._functions.close()

    def run(self) -> None:
        """Serve from a program without a running loop, and close."""
        try:
            self.arq.loop.run_until_complete(self.main())
        finally:
            self.arq.loop.run_until_complete(self.close())

    async def run_check(self, retry_jobs: bool | None = None, max_burst_jobs: int | None = None) -> int:
        """Serve; the number of calls that succeeded. Raises arq's FailedJobs where some failed."""
        arq = self.arq
        arq.retry_jobs = arq.retry_jobs if retry_jobs is None else retry_jobs
        arq.max_burst_jobs = arq.max_burst_jobs if max_burst_jobs is None else max_burst_jobs
        await self.main()
        if arq.jobs_failed:
            raise FailedJobs(arq.jobs_failed, [one for one in await arq.pool.all_job_results() if not one.success])
        return arq.jobs_complete

    async def close(self) -> None:
        """Remove the health record and call the shutdown hook; the connections are the caller's."""
        await self.arq.pool.delete(self.arq.health_check_key)
        if self.arq.on_shutdown:
            await self.arq.on_shutdown(self.arq.ctx)

    def handle_sig(self, signum: signal.Signals) -> None:
        """A signal stops the worker in order."""
        self.stop.set()
        self.wake.set()
        if self.on_stop:
            self.on_stop(signum)

    def served(self) -> list[str]:
        """Names of the functions."""
        return self._functions.served()

    def held(self) -> KeysView[str]:
        """Ids of the jobs that it holds now."""
        return self._functions.held()

    def _after_claim(self, got: Claimed) -> None:
        self.arq.jobs_failed += got.over
        if self._on_claim:
            self._on_claim(got)
