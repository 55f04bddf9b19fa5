"""`LeasedWorker`: arq's Worker with claims, leases and fenced commits in the place of arq's own loop.

    claim (many at once) ──▶ accept ──▶ tasks ──▶ committer (everything of a tick in one call)
        ▲                                 │
        └── a signal, a poll, or room ◀───┘

| waits for          | unblocked by                                  |
|--------------------|-----------------------------------------------|
| jobs               | a signal of enqueue, or the next poll         |
| room               | a task that ends                              |
| its last jobs      | their end, or `drain_s` after a stop          |

- Functions, cron jobs, hooks, burst mode, health record and counters are arq's; every way into Redis is ours.
- On stop: no more claims, finish within `drain_s`, hand the rest back; after an engine's error with blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Coroutine, Sequence
from signal import Signals
from typing import Any, cast

from arq.worker import Function, Worker
from redis import RedisError
from redis.asyncio import Redis

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import EngineError, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.arq_functions import Calls
from sluice.pipeline.queue.committer import Committer
from sluice.pipeline.queue.envelope import arq_deserializer, arq_pool, arq_serializer
from sluice.pipeline.queue.lease_keeper import LeaseKeeper
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.queue.types import Claim, Claimed
from sluice.pipeline.wire.keys import Keys

_FULL_POLL_S = 0.1  # between looks at the queue while there is no room
_BEAT_S = 0.5
_SWEEP_S = 5.0
_WATCH_POLLS = 40  # a worker that looks for what rings no bell answers for it for so many polls
_STAND_DOWN_S = 1.0


class LeasedWorker(Worker):
    """Serves one queue until `stop` is set. Further options are those of `arq.Worker`."""

    def __init__(
        self,
        functions: Sequence[Any] = (),
        *,
        client: Redis,
        keys: Keys,
        config: Config,
        name: str = "",
        stop: asyncio.Event | None = None,
        **options: Any,
    ) -> None:
        settings = config.worker
        options.setdefault("poll_delay", settings.poll_s)
        options.setdefault("keep_result", settings.keep_result_s)
        super().__init__(
            cast("Sequence[Function]", functions),
            queue_name=keys.jobs,
            redis_pool=arq_pool(client, keys.jobs),
            job_serializer=arq_serializer,
            job_deserializer=arq_deserializer,
            **options,
        )
        self.jobs_failed: int = 0
        self.settings, self.stop = settings, stop or asyncio.Event()
        self.queue = JobQueue(
            client, keys, partitions=config.consumer.count, worker=name, keep_result_s=self.keep_result_s or 0
        )
        self.keeper = LeaseKeeper(config, self.queue, self._alive, self._lost_from_thread)
        self.committer = Committer(self.queue, self.is_busy, self._cleared)
        self.broken: BaseException | None = None
        self.more = False  # jobs were ready at the last claim
        self.wake = asyncio.Event()
        self._waker = Waker(client, keys.wake, self.wake, config.broker.socket_timeout_s)
        self._calls = Calls(self)
        self._must_drain = False
        self._suspects = set[str]()  # jobs that have this worker for themselves, until they get on
        self._pulse = Pulse(min(_BEAT_S, settings.stall_timeout_s / 4))
        self._recorded = self._swept = float("-inf")
        self._look_at = float("-inf")  # monotonic seconds

    def progress(self) -> float:
        """Monotonic seconds of the last sign of life of whatever does the work."""
        return time.monotonic()

    def room(self) -> int:
        """Sequences that may be claimed now."""
        return self.max_jobs - len(self._calls)

    def num_held(self) -> int:
        """Jobs that are held now."""
        return len(self._calls)

    def holds(self, job_id: str) -> bool:
        """Whether it is held now."""
        return job_id in self._calls

    def is_busy(self) -> bool:
        """Whether commits may wait for a tick."""
        return False

    async def accept(self, claim: Claim) -> None:
        """Start a claimed job."""
        await self._calls.accept(claim)

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel the local attempt of a job that is not ours any more; False if it is not held."""
        return self._calls.lose(job_id, attempt)

    def take_back(self, *, started: bool) -> list[Claim]:
        """Stop holding the jobs of which nothing was started, or all of them."""
        return self._calls.take_back() if started else []

    def served(self) -> list[str]:
        """Names of the functions."""
        return sorted(self.functions)

    async def before_claim(self) -> bool:
        """Whether to claim now."""
        return True

    def report(self) -> None:
        """Say what is going on."""

    async def main(self) -> None:
        """Serve until `stop` is set, or in burst mode until the queue is empty; raises what broke the engine."""
        self.loop = asyncio.get_running_loop()
        self.ctx["redis"] = self.pool
        if self.on_startup:
            await self.on_startup(self.ctx)
        self.keeper.start()
        self._pulse.start(self.committer.run(), self._waker.run())
        try:
            while not self.stop.is_set():
                busy = await self._turn()
                if await self._is_done():
                    break
                if not busy:
                    await self._pause()
            await self._drain()
            if self.broken is not None:
                raise self.broken
        except (EngineError, WeightsError) as error:
            self.broken = error
            raise
        finally:
            try:
                await self._hand_back()
            finally:
                await self._pulse.end()
                await asyncio.to_thread(self.keeper.stop)

    async def _turn(self) -> bool:
        """One claim, if one is due; True when it brought something or another one is worth while at once."""
        self.check_health()
        self._calls.end_overdue()
        if time.monotonic() - self._recorded >= _BEAT_S:
            self._recorded = time.monotonic()
            await self.heart_beat()
        if time.monotonic() - self._swept >= _SWEEP_S:
            self._swept = time.monotonic()
            await self.queue.sweep(_SWEEP_S)
        claims = await self.before_claim()
        if time.monotonic() < self._look_at:
            self.report()
            return False
        room = self.room() if claims and not self.runs_apart() else 0
        if self.burst and self.max_burst_jobs >= 0:
            room = min(room, self.max_burst_jobs - self._num_done() - self.num_held())
        got = await self._claim(max(0, room))
        self.report()
        if (got.claims or got.more) and self._has_room():
            return True
        pause_s = got.again_s or (self.poll_delay_s if self._has_room() else _FULL_POLL_S)
        self._look_at = time.monotonic() + pause_s
        return False

    async def _claim(self, room: int) -> Claimed:
        settings = self.settings
        watch_s = _WATCH_POLLS * self.poll_delay_s
        got = await self.queue.claim(
            room, settings.lease_s, settings.max_attempts, self.num_held(), watch_s=0 if self.burst else watch_s
        )
        self.after_claim(got)
        self.jobs_failed += got.over
        self.more = got.more
        self._must_drain = got.must_drain
        # It is empty for the suspects that it holds.
        if got.must_drain and not any(self.holds(job_id) for job_id in self._suspects):
            await self.put_back()
        for job_id in got.cancelled:
            self._lost(job_id, None)
        for claim in got.claims:
            if self.lose(claim.job_id, None):
                get_logger().warning("own lease had run out; its attempt starts anew", job=claim.job_id)
            if claim.alone:
                self._suspects.add(claim.job_id)
            self.keeper.hold(claim)
            await self.accept(claim)
        return got

    def runs_apart(self) -> bool:
        """Nothing else is taken: suspects are to run apart, or do."""
        self._suspects = {job_id for job_id in self._suspects if self.holds(job_id)}
        return self._must_drain or bool(self._suspects)

    def _cleared(self, job_id: str) -> None:
        """It has got on, so it is not what ended its last worker."""
        if job_id in self._suspects:
            self._suspects.discard(job_id)
            self.wake.set()

    def _has_room(self) -> bool:
        return self.room() > 0 and not self.runs_apart()

    def after_claim(self, got: Claimed) -> None:
        """What else the answer says."""

    async def _pause(self) -> None:
        """Until something ends, a job comes, or a look or a beat is due."""
        self._waker.listen(self._has_room())
        due = min(self._look_at, self._recorded + _BEAT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self.wake.wait()
        if self.wake.is_set():
            self._look_at = float("-inf")
            self.wake.clear()

    async def _is_done(self) -> bool:
        """In burst mode: the queue is empty, or enough jobs were done."""
        if not self.burst or self.num_held():
            return False
        await self.committer.flush()
        if 0 <= self.max_burst_jobs <= self._num_done():
            return True
        return not await self.pool.zcard(self.queue_name)

    def _num_done(self) -> int:
        return self.jobs_complete + self.jobs_failed + self.jobs_retried

    def check_health(self) -> None:
        """Raise what broke the engine, the lease keeper's finding, or the error of a helper task."""
        if self.broken is not None:
            raise self.broken
        if self.keeper.stalled:
            raise EngineError(f"no progress for {self.settings.stall_timeout_s:.0f} s")
        if not self.keeper.is_alive():
            raise EngineError("the thread that keeps the leases has ended")
        self._pulse.check()

    def _alive(self) -> float:
        return min(self._pulse.beaten, self.progress())

    def ended(self, claim: Claim) -> None:
        """A job's last task has ended: its lease is kept until what it brought is committed."""
        self.committer.when_flushed(lambda: self.keeper.drop(claim.job_id, claim.attempt))
        wants_more = self.more and self._has_room()
        if self.broken is not None or wants_more or self._must_drain or not self.num_held():
            self.wake.set()

    def _lost_from_thread(self, job_id: str, attempt: int | None) -> None:
        self.loop.call_soon_threadsafe(self._lost, job_id, attempt)

    def _lost(self, job_id: str, attempt: int | None) -> None:
        if self.lose(job_id, attempt):
            self.keeper.drop(job_id)
            self.wake.set()
            get_logger().warning("lease lost; its attempt is cancelled", job=job_id, attempt=attempt)

    async def put_back(self) -> None:
        """Return the jobs of which nothing was started: nobody is to blame for it."""
        back = self.take_back(started=False)
        for claim in back:
            self.keeper.drop(claim.job_id)
        await self.queue.release(back)

    async def _drain(self) -> None:
        leaving_s = self.settings.drain_s + self.settings.lease_s if self.num_held() else 0.0
        with contextlib.suppress(TimeoutError, RedisError, OSError):  # its time as watcher runs out by itself
            async with asyncio.timeout(_STAND_DOWN_S):
                await self.queue.stand_down(leaving_s)
        await self.put_back()
        until = time.monotonic() + self.settings.drain_s
        while self.num_held() and self.broken is None and (left := until - time.monotonic()) > 0:
            self.report()
            self._calls.end_overdue()
            self.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.2)):
                    await self.wake.wait()
        await self.committer.flush()

    async def _hand_back(self) -> None:
        """Return all that is still ours: without blame, or with it when the engine failed."""
        unstarted = self.take_back(started=False)
        running = self.take_back(started=True)
        await self.committer.flush()  # what ended since the drain; a job with a commit in hand is not held
        await self.queue.release(unstarted)
        error = self.broken
        if error is None or isinstance(error, RedisError | OSError | WeightsError):  # no job's failure
            await self.queue.release(running)
            return
        trace = "".join(traceback.format_exception(error))
        most = self.settings.max_attempts
        await self.queue.release(running, blame=f"the engine failed: {error}", traceback=trace, most=most)

    def handle_sig(self, signum: Signals) -> None:
        """A signal stops the worker in order."""
        self.stop.set()
        self.wake.set()
        if self.on_stop:
            self.on_stop(signum)

    handle_sig_wait_for_completion = handle_sig

    async def close(self) -> None:
        """End the worker's arq side; the connections are the caller's."""
        await self.pool.delete(self.health_check_key)
        if self.on_shutdown:
            await self.on_shutdown(self.ctx)


class Pulse:
    """`beaten` is the monotonic time of the loop's last turn: a loop that hangs stops beating."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.beaten = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *background: Coroutine[Any, Any, None]) -> None:
        """Run these until `end`."""
        self.beaten = time.monotonic()
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in (*background, self._beat())]

    def check(self) -> None:
        """Raise the error of a task that has ended."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        """Cancel the tasks until they are gone (Python 3.11 may swallow a cancellation)."""
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)

    async def _beat(self) -> None:
        while True:
            self.beaten = time.monotonic()
            await asyncio.sleep(self._every_s)


_BLOCK_S = 5.0


class Waker:
    """`rang` is set by a signal; `listen` while there is nothing to do."""

    def __init__(self, client: Redis, key: str, rang: asyncio.Event, socket_timeout_s: float) -> None:
        self._client, self._key, self._rang = client, key, rang
        self._block_s = min(_BLOCK_S, socket_timeout_s / 2)  # or each wait would look like an outage
        self._idle = asyncio.Event()

    def listen(self, idle: bool) -> None:
        """Whether this worker sleeps."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def run(self) -> None:
        """Pass signals on until cancelled."""
        while True:
            await self._idle.wait()
            pop = cast(Any, self._client).blpop([self._key], timeout=self._block_s)
            if await cast("Awaitable[Any]", pop):
                self._rang.set()
                self._idle.clear()
