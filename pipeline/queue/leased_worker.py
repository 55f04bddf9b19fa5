"""The loop that owns a worker's leases: it claims, renews, commits and hands back; a `Holder` does the work.

    claim (many at once) ──▶ Holder.accept ──▶ its tasks ──▶ committer (everything of a tick in one call)
        ▲                                        │
        └── a signal, a poll, or room ◀──ended───┘

| waits for          | unblocked by                                  |
|--------------------|-----------------------------------------------|
| jobs               | a signal of enqueue, or the next poll         |
| room               | a task that ends                              |
| its last jobs      | their end, or `drain_s` after a stop          |
| new weights        | their load, or a hang of the engine           |

On stop: no more claims, finish within `drain_s`, hand the rest back; after an engine's error with blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import msgspec
import redis
from redis import RedisError
from redis.asyncio import Redis

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import BlockingScripts
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerError, EngineError, EngineHangs, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.committer import Committer
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.queue.types import Claim, Claimed, Piece
from sluice.pipeline.wire.keys import Keys

_FULL_POLL_S = 0.1  # between looks at the queue while there is no room
_BUSY_POLLS = 2  # between looks with jobs in hand and room for more, in polls; most jobs ring
_BEAT_S = 0.5
_SWEEP_S = 5.0
_WATCH_POLLS = 40  # how long, in polls, the watcher's claim to poll for jobs without a signal lasts (watch.lua)
_STAND_DOWN_S = 1.0
_BLOCK_S = 5.0


class Holder(Protocol):
    """Does the work of claimed jobs: decode sequences (workers/decode_worker.py) or plain functions (arq_worker.py).

    It reports to its LeasedWorker: results through `committer`, then `ended`; or `fail`, `give_back`, `broke`.
    """

    def room(self) -> int:
        """Sequences that may be claimed now."""
        ...

    def held(self) -> Collection[str]:
        """Ids of the jobs that it holds now."""
        ...

    async def accept(self, claim: Claim) -> None:
        """Start a claimed job."""
        ...

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel a job whose lease is lost; False if that attempt is not held."""
        ...

    def take_back(self, *, started: bool) -> list[Claim]:
        """Give up the jobs that have not started, or all of them; their claims."""
        ...


def _nothing(*_: Any) -> None:
    pass


async def _nothing_to_await() -> None:
    pass


class Turn(Protocol):
    """What the loop of one queue has to know of the others, where several share what does the work.

    `Holder.room` says how much of it this queue may take now; whose turn it is, is woken (`LeasedWorker.wake`).
    """

    @property
    def quota(self) -> int:
        """Sequences of this queue at once, on all workers; 0: any number."""
        ...

    def is_open(self) -> bool:
        """Whether there is room, for whichever queue."""
        ...

    def others(self) -> int:
        """Jobs of other queues that this process holds: with them, no suspect runs apart."""
        ...

    def asks(self, count: int) -> None:
        """The loop claims jobs worth so many sequences now."""
        ...


@dataclass(frozen=True)
class Hooks:
    """What the role does around the loop."""

    progress: Callable[[], float] = time.monotonic  # monotonic seconds of the last sign of life of what does the work
    is_busy: Callable[[], bool] = lambda: False  # commits may wait for a tick
    beat: Callable[[], Awaitable[None]] = _nothing_to_await  # every half second
    before_claim: Callable[[], Awaitable[None]] = _nothing_to_await
    after_claim: Callable[[Claimed], None] = _nothing
    before_hand_back: Callable[[], Awaitable[None]] = _nothing_to_await  # store what running jobs have, within seconds
    each_turn: Callable[[], None] = _nothing  # update the status; also while draining
    is_done: Callable[[], bool] = lambda: False  # in burst mode: enough was done
    turn: Turn | None = None  # of a queue that shares what does the work with others


class LeasedWorker:
    """Serves one queue until `stop` is set; with `burst`, until the queue is empty."""

    def __init__(
        self,
        *,
        client: Redis,
        keys: Keys,
        config: Config,
        name: str = "",
        stop: asyncio.Event | None = None,
        poll_s: float | None = None,
        full_poll_s: float = _FULL_POLL_S,
        keep_result_s: float | None = None,
    ) -> None:
        """`poll_s` and `keep_result_s`: instead of the configured ones. `full_poll_s`: between looks without room."""
        self._client, self._jobs_key = cast(Any, client), keys.jobs
        self.settings, self.stop = config.worker, stop or asyncio.Event()
        self.burst = False
        self._poll_s = self.settings.poll_s if poll_s is None else poll_s
        self._full_poll_s = full_poll_s
        kept_s = self.settings.keep_result_s if keep_result_s is None else keep_result_s
        self.queue = JobQueue(client, keys, partitions=config.consumer.count, worker=name, keep_result_s=kept_s)
        self.keeper = LeaseKeeper(config, self.queue, self._alive, self._lost_from_thread)
        self.committer = Committer(self.queue, lambda: self._hooks.is_busy(), self._cleared)
        self.broken: BaseException | None = None
        self.more = False  # jobs were ready at the last claim
        self.wake = asyncio.Event()
        self._waker = Waker(
            client, [f"{keys.wake}:{self.queue.owner}", keys.wake], self.wake, config.broker.socket_timeout_s
        )
        self._must_drain = False
        self._unaccepted = deque[Claim]()  # claimed, and not yet the holder's
        self._suspects = set[str]()  # jobs that have this worker for themselves, until they get on
        self._limit: asyncio.Timeout | None = None  # of what waits for the engine now
        self._pulse = Pulse(min(_BEAT_S, self.settings.stall_timeout_s / 4), self._look_for_hangs)
        self._beaten = self._swept = float("-inf")
        self._look_at = float("-inf")  # monotonic seconds

    async def serve(self, holder: Holder, hooks: Hooks) -> None:
        """Until `stop` is set, or in burst mode until the queue is empty; raises what broke the engine."""
        self._holder, self._hooks, self._loop = holder, hooks, asyncio.get_running_loop()
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

    def ended(self, claim: Claim) -> None:
        """A job's last task has ended: its lease is kept until what it brought is committed."""
        self.committer.when_flushed(lambda: self.keeper.drop(claim.job_id, claim.attempt))
        wants_more = self.more and self._has_room()
        if self.broken is not None or wants_more or self._must_drain or not self._holder.held():
            self.wake.set()

    def freed(self) -> None:
        """A sequence ended and its job continues: there may be room for more."""
        if self.more and self._holder.room() > 0:
            self.wake.set()

    def store(self, piece: Piece) -> None:
        """Progress of a running sequence; from any thread."""
        self._loop.call_soon_threadsafe(self.committer.store, piece)

    def broke(self, error: BaseException) -> None:
        """The engine failed: the worker ends and hands its jobs back with blame."""
        self.broken = error
        self.wake.set()

    async def fail(
        self, claim: Claim, reason: str, detail: str, trace: str = "", ending: Literal["dead", "dropped"] = "dead"
    ) -> None:
        """End a job that cannot be done: its uncommitted sequences become dead letters, or are dropped."""
        self.keeper.drop(claim.job_id, claim.attempt)
        await self.queue.fail(claim, reason, detail, trace, ending)

    async def give_back(self, claim: Claim, delay_s: float, *, tried: bool = False) -> None:
        """Return a job to the queue after a delay; `tried`: it used up one of its function's tries."""
        self.keeper.drop(claim.job_id, claim.attempt)
        await self.queue.release([claim], delay_s, tried=tried)

    def runs_apart(self) -> bool:
        """Claim nothing else: suspects must run apart, or are running apart."""
        if self._suspects:
            self._suspects &= set(self._holder.held())
        return self._must_drain or bool(self._suspects)

    async def _turn(self) -> bool:
        """One claim, if one is due; True if the next one should follow at once."""
        self._check_health()
        if time.monotonic() - self._beaten >= _BEAT_S:
            self._beaten = time.monotonic()
            await self._hooks.beat()
        if time.monotonic() - self._swept >= _SWEEP_S:
            self._swept = time.monotonic()
            await self.queue.sweep(_SWEEP_S)
        await self._unless_hung(self._hooks.before_claim())
        if self.stop.is_set() or time.monotonic() < self._look_at:
            self._hooks.each_turn()
            return False
        got = await self._claim(0 if self.runs_apart() else max(0, self._holder.room()))
        self._hooks.each_turn()
        if got.more and self._has_room():  # else the claimed ones start first; jobs that came since have rung
            return True
        self._look_at = time.monotonic() + (got.again_s or self._poll_now_s())
        return False

    async def _unless_hung(self, work: Awaitable[None]) -> None:
        """What may wait for the engine, minutes for new weights: if it hangs over what it runs, that never ends."""
        self._limit = limit = asyncio.timeout(None)
        try:
            async with limit:
                await work
        except TimeoutError:
            if limit.expired():
                raise self._hang() from None
            raise
        finally:
            self._limit = None

    def _look_for_hangs(self) -> None:
        limit = self._limit
        if self.keeper.stalled and limit is not None and not limit.expired():
            limit.reschedule(self._loop.time())

    def _poll_now_s(self) -> float:
        """Each look takes time from what does the work."""
        if not self._has_room():
            return self._full_poll_s
        return _BUSY_POLLS * self._poll_s if self._holder.held() else self._poll_s

    async def _claim(self, room: int) -> Claimed:
        settings, holder, turn = self.settings, self._holder, self._hooks.turn
        watch_s = 0 if self.burst else _WATCH_POLLS * self._poll_s
        if turn is not None:
            turn.asks(room)
        got = await self.queue.claim(
            room,
            settings.lease_s,
            settings.max_attempts,
            len(holder.held()) + (turn.others() if turn else 0),
            watch_s=watch_s,
            prefix_wait_s=settings.prefix_wait_s,
            quota=turn.quota if turn else 0,
            looks=turn is not None,
        )
        self._hooks.after_claim(got)
        self.more = got.more
        self._must_drain = got.must_drain
        # Where it holds suspects, it was emptied for them already.
        if got.must_drain and self._suspects.isdisjoint(holder.held()):
            await self._put_back()
        for job_id in got.cancelled:
            self._lost(job_id, None)
        self._unaccepted.extend(got.claims)
        for claim in got.claims:
            self.keeper.hold(claim)  # all of them first: accepting one may take long
        while self._unaccepted:
            claim = self._unaccepted[0]
            if holder.lose(claim.job_id, None):
                get_logger().warning("own lease had expired; its attempt starts over", job=claim.job_id)
            if claim.alone:
                self._suspects.add(claim.job_id)
            await self._unless_hung(holder.accept(claim))
            self._unaccepted.popleft()
        return got

    def _cleared(self, job_id: str) -> None:
        """A suspect that makes progress is not what ended its last worker."""
        if job_id in self._suspects:
            self._suspects.discard(job_id)
            self.wake.set()

    def _has_room(self) -> bool:
        return self._holder.room() > 0 and not self.runs_apart()

    async def _pause(self) -> None:
        """Wait for a job, an ending, the next poll or the next beat."""
        turn = self._hooks.turn
        self._waker.listen(self._has_room() or (turn is not None and turn.is_open() and not self.runs_apart()))
        due = min(self._look_at, self._beaten + _BEAT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self.wake.wait()
        if self.wake.is_set():
            self._look_at = float("-inf")
            self.wake.clear()

    async def _is_done(self) -> bool:
        """In burst mode: the queue is empty, or enough jobs were done."""
        if not self.burst or self._holder.held():
            return False
        await self.committer.flush()
        return self._hooks.is_done() or not await self._client.zcard(self._jobs_key)

    def _check_health(self) -> None:
        """Raise what broke the engine, the lease keeper's finding, or the error of a helper task."""
        if self.broken is not None:
            raise self.broken
        if self.keeper.stalled:
            raise self._hang()
        if not self.keeper.is_alive():
            raise EngineError("the lease keeper thread has died")
        self._pulse.check()

    def _hang(self) -> EngineHangs:
        return EngineHangs(f"no progress for {self.settings.stall_timeout_s:.0f} s")

    def _alive(self) -> float:
        return min(self._pulse.beaten, self._hooks.progress())

    def _lost_from_thread(self, job_id: str, attempt: int | None) -> None:
        self._loop.call_soon_threadsafe(self._lost, job_id, attempt)

    def _lost(self, job_id: str, attempt: int | None) -> None:
        is_lost = self._holder.lose(job_id, attempt)
        if is_lost or attempt is not None:  # a job that the holder no longer knows isn't renewed for ever
            self.keeper.drop(job_id, attempt)
        if is_lost:
            self.wake.set()
            get_logger().warning("lease lost; its attempt is cancelled", job=job_id, attempt=attempt)

    async def _put_back(self) -> None:
        """Return the jobs that have not started, without blame."""
        back = self._holder.take_back(started=False)
        for claim in back:
            self.keeper.drop(claim.job_id)
        await self.queue.release(back)

    async def _drain(self) -> None:
        leaving_s = self.settings.drain_s + self.settings.lease_s if self._holder.held() else 0.0
        with contextlib.suppress(TimeoutError, RedisError, OSError):  # its claim as watcher expires by itself
            async with asyncio.timeout(_STAND_DOWN_S):
                await self.queue.stand_down(leaving_s)
        await self._put_back()
        until = time.monotonic() + self.settings.drain_s
        while self._holder.held() and self.broken is None and (left := until - time.monotonic()) > 0:
            self._hooks.each_turn()
            self.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.2)):
                    await self.wake.wait()
        await self.committer.flush()

    async def _hand_back(self) -> None:
        """Return every job that is still ours, with blame if the engine failed."""
        if self.broken is None and not self.keeper.stalled:
            await self._hooks.before_hand_back()
        held = set(self._holder.held())
        unstarted = [claim for claim in self._unaccepted if claim.job_id not in held]
        unstarted += self._holder.take_back(started=False)
        running = self._holder.take_back(started=True)
        await self.committer.flush()  # what ended since the drain; a job whose commit is pending is no longer held
        await self.queue.release(unstarted)
        error = self.broken
        if error is None or isinstance(error, RedisError | OSError | WeightsError):  # not a job's fault
            await self.queue.release(running)
            return
        trace = "".join(traceback.format_exception(error))
        most = self.settings.max_attempts
        await self.queue.release(running, blame=f"the engine failed: {error}", traceback=trace, most=most)


class Pulse:
    """The loop's background tasks and its sign of life: `beaten` is the monotonic time of its last turn."""

    def __init__(self, every_s: float, each_time: Callable[[], None]) -> None:
        self._every_s, self._each_time = every_s, each_time
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
            self._each_time()
            await asyncio.sleep(self._every_s)


class Waker:
    """Wakes an idle worker the moment a job comes: a blocking pop on its own wake list and the run's sets `rang`.

    It listens only while its worker is idle: a busy worker would steal the signal from a sleeping one. Jobs of arq's
    own enqueue_job, deferred jobs and expired leases send no signal: one worker polls for them, and the others notice
    within `_WATCH_POLLS` polls when it is gone (watch.lua).
    """

    def __init__(self, client: Redis, bells: Sequence[str], rang: asyncio.Event, socket_timeout_s: float) -> None:
        self._client, self._bells, self._rang = client, list(bells), rang
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
            pop = cast(Any, self._client).blpop(self._bells, timeout=self._block_s)
            if await cast("Awaitable[Any]", pop):
                self._rang.set()
                self._idle.clear()


class LeaseKeeper(threading.Thread):
    """Renews a worker's leases from a separate thread, so a busy event loop or a long engine step loses none.

    - It renews every `renew_s`; `hold` and `drop` are thread-safe, `progress` is in monotonic seconds.
    - Renewal stops after `stall_timeout_s` without progress: a hung engine or event loop loses its jobs.
    - A lost lease (or an aborted job) cancels the local attempt through `on_lost(job_id, attempt)`.
    - A process still stalled one lease later is killed, so that its successor can take over.
    """

    def __init__(
        self, config: Config, queue: JobQueue, progress: Callable[[], float], on_lost: Callable[[str, int | None], Any]
    ) -> None:
        super().__init__(name="lease-keeper", daemon=True)
        self._config, self._queue, self._progress, self._on_lost = config, queue, progress, on_lost
        short = min(config.broker.socket_timeout_s, config.worker.lease_s / 4)  # a slow answer must not cost the lease
        self._broker = msgspec.structs.replace(config.broker, socket_timeout_s=short, connect_timeout_s=short)
        self._client: redis.Redis | None = None
        self._scripts: BlockingScripts | None = None
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self.stalled = False

    def hold(self, claim: Claim) -> None:
        """Start renewing a claim."""
        with self._lock:
            self._held[claim.job_id] = claim.attempt

    def drop(self, job_id: str, attempt: int | None = None) -> None:
        """Stop renewing a claim, for this attempt only; a later one may be held by now."""
        with self._lock:
            if attempt in (None, self._held.get(job_id)):
                self._held.pop(job_id, None)

    def held(self) -> list[str]:
        """Ids of the jobs with leases it renews."""
        with self._lock:
            return list(self._held)

    def run(self) -> None:
        worker = self._config.worker
        while not self._end.wait(worker.renew_s):
            idle_s = time.monotonic() - self._progress()
            with self._lock:
                held = dict(self._held)
            self.stalled = bool(held) and idle_s > worker.stall_timeout_s
            if self.stalled:
                get_logger().error("stalled; letting its leases expire", idle_s=round(idle_s, 1), jobs=sorted(held)[:8])
                if idle_s > worker.stall_timeout_s + worker.lease_s:
                    get_logger().error("still stalled; exiting", idle_s=round(idle_s, 1))
                    os._exit(EngineError.exit_code)
            elif held:
                self._renew(held)
        self._disconnect()

    def stop(self) -> None:
        self._end.set()
        self.join(timeout=self._config.broker.socket_timeout_s + 1)

    def _renew(self, held: dict[str, int]) -> None:
        try:
            if self._client is None or self._scripts is None:
                self._client = connection.connect_sync(self._broker, self._config.run)
                self._scripts = BlockingScripts(self._client)
            lost = self._scripts.ask(self._queue.names, self._queue.renewal(self._config.worker.lease_s, held))
        except (redis.RedisError, BrokerError) as error:
            get_logger().warning("renewal failed; the next one is due soon", error=str(error))
            self._disconnect()  # in a cluster the run may have moved to another node
            return
        for job_id in lost:
            self._on_lost(job_id, held.get(job_id))

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._scripts = None
