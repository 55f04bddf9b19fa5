"""The queue worker: claims jobs, decodes their missing sequences, commits each one as it ends.

    claim loop ──▶ held jobs ──▶ a task per sequence ──▶ backend.decode ──▶ committer (one script call per tick)

| waits for        | unblocked by                  |
|------------------|-------------------------------|
| jobs             | producer                      |
| room (held.py)   | a sequence that ends          |
| running sequences| before new weights are loaded |

- A sequence that cannot be decoded ends its job as dead letters; its neighbours go on.
- A little more is claimed than the engine decodes at once, so that it never waits for the queue. What was not
  started is put back at once when new weights come or on stop.
- On stop: no more claims, finish within `drain_s`, hand the rest back without blame.
- Polls only when that can change something: each turn is time that the decode thread lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from pipeline.errors import EngineError, RequestError
from pipeline.jobs import Claim, Finished, JobQueue, seed_for
from pipeline.lifecycle import Role
from pipeline.logs import get_logger
from pipeline.messages import DecodeJob, SequenceResult
from pipeline.tokens import FloatArray, Runs, TokenArray
from workers.committer import Committer
from workers.generation.contracts import Backend, SequenceOutput, SequenceRequest
from workers.generation.prompts import PromptRenderer
from workers.held import HeldJob, HeldJobs
from workers.lease import LeaseKeeper
from workers.weights_watch import WeightsWatch

_FULL_POLL_S = 0.1  # between looks for new weights while the batch is full
_RUNNING_POLL_S = 0.02  # between claims while something runs and the queue was empty


class DecodeWorker:
    """One engine on the queue."""

    def __init__(self, role: Role, backend: Backend, prompts: PromptRenderer) -> None:
        self._role, self._backend, self._prompts = role, backend, prompts
        self._settings = role.config.worker
        partitions = role.config.consumer.count
        self._queue = JobQueue(role.client, role.keys, partitions=partitions, worker=role.name)
        self._weights = WeightsWatch(role, backend)
        self._held = HeldJobs(self._settings.max_batch)
        self._committer = Committer(self._queue, self._held.full)
        self._wake = asyncio.Event()
        self._queue_is_empty = True  # as far as the last claim told
        self._loop = asyncio.get_running_loop()
        self._keeper = LeaseKeeper(role.config, self._queue, backend.progress, self._lost_from_thread)
        self._broken: BaseException | None = None

    async def run(self) -> None:
        """Serve until asked to stop; raises EngineError when the engine cannot go on."""
        self._keeper.start()
        self._role.spawn(self._committer.run())
        self._role.spawn(self._wake_on_stop())
        try:
            while not self._role.stop.is_set():
                await self._turn()
            await self._drain()
        finally:
            await self._hand_back()
            await asyncio.to_thread(self._keeper.stop)

    async def _turn(self) -> None:
        self._check_health()
        newer = await self._weights.newer()
        if newer is not None:
            await self._put_back()
            if not self._held:
                await self._weights.pull(newer)
                newer = None
        claimed = await self._claim() if newer is None else 0
        self._report(newer)
        if not claimed:
            await self._pause()

    async def _claim(self) -> int:
        """Fetch what there is room for; the number of jobs."""
        room = self._held.room()
        if room <= 0:
            return 0
        claims = await self._queue.claim(room, self._settings.lease_s, self._settings.max_attempts)
        self._queue_is_empty = not claims
        for claim in claims:
            await self._start(claim)
        return len(claims)

    async def _pause(self) -> None:
        """Until a sequence's end makes room for what is in the queue, or a poll is due."""
        polls = self._held and self._queue_is_empty
        delay = min(_RUNNING_POLL_S, self._settings.poll_s) if polls else self._settings.poll_s
        if self._held.full():
            delay = _FULL_POLL_S
        self._wake.clear()
        if self._role.stop.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wake.wait()

    async def _wake_on_stop(self) -> None:
        await self._role.stop.wait()
        self._wake.set()

    def _check_health(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._keeper.stalled:
            raise EngineError(f"the engine made no progress for {self._settings.stall_timeout_s:.0f} s")

    def _report(self, newer: int | None) -> None:
        running = self._held.running
        if newer is not None:
            cause = f"{running} running sequences to end before weights v{newer} are loaded"
        else:
            cause = None if running else "jobs (none is ready)"
        self._role.status.waiting(cause)
        self._role.status.fact(
            version=self._backend.version,
            running=running,
            sequences=self._committer.sequences,
            tokens=self._committer.tokens,
        )

    async def _start(self, claim: Claim) -> None:
        job = claim.job
        if job is None:
            get_logger().error("job refused", job=claim.job_id, problem=claim.problem)
            await self._queue.fail(claim, claim.problem.partition(":")[0].replace(" ", "_"), claim.problem)
            return
        try:
            prompt = self._prompts.render(job)
        except RequestError as error:
            await self._queue.fail(claim, "invalid_request", str(error))
            return
        if job.min_weight_version > self._backend.version:
            await self._queue.release([claim], delay_s=0.5)
            return
        if self._held.lose(claim.job_id):
            get_logger().warning("own lease had run out; its attempt starts anew", job=claim.job_id)
        self._keeper.hold(claim)
        missing = deque(index for index in range(job.n) if index not in claim.committed)
        self._held.add(HeldJob(claim, job, prompt, missing))
        self._held.fill(self._sequence_task)

    def _sequence_task(self, held: HeldJob, index: int) -> asyncio.Task[None]:
        task = self._loop.create_task(self._sequence(held.claim, held.job, held.prompt, index))
        task.add_done_callback(lambda ended: self._ended(held, ended))
        return task

    async def _sequence(self, claim: Claim, job: DecodeJob, prompt: list[int], index: int) -> None:
        sampling = job.sampling
        seed = sampling.seed if sampling.seed is not None else self._role.config.seed
        request = SequenceRequest(
            seq_key=f"{claim.job_id}:{index}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            seed=seed_for(seed, claim.job_id, index),
        )
        started = time.time()
        try:
            output = await self._backend.decode(request)
        except RequestError as error:
            await self._queue.fail(claim, "invalid_request", str(error))
            return
        self._committer.put(Finished(claim, self._result(claim, job, prompt, index, output, started)))

    def _result(
        self,
        claim: Claim,
        job: DecodeJob,
        prompt: list[int],
        index: int,
        output: SequenceOutput,
        started: float,
    ) -> SequenceResult:
        return SequenceResult(
            seq_id=f"{claim.job_id}:{index}",
            group_id=claim.job_id,
            group_size=job.n,
            index=index,
            attempt=claim.attempt,
            worker=self._role.name,
            backend=self._backend.facts.name,
            engine_version=self._backend.facts.engine_version,
            prompt_token_ids=TokenArray(prompt),
            token_ids=TokenArray(output.token_ids),
            logprobs=FloatArray(output.logprobs),
            versions=Runs.of(output.versions),
            text=output.text,
            raw_text=output.raw_text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            triggers={"repeat_terminate": 0},
            sampling=job.sampling,
            timings=_timings(claim, started),
            truth=job.truth,
            task=job.task,
            metadata=job.metadata,
        )

    def _ended(self, held: HeldJob, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
        job_id = held.claim.job_id
        if self._held.end(held, task):
            self._committer.when_flushed(lambda: self._keeper.drop(job_id))
        self._held.fill(self._sequence_task)
        if self._broken is not None or not self._held or (not self._queue_is_empty and self._held.room() > 0):
            self._wake.set()

    def _lost_from_thread(self, job_id: str, attempt: int) -> None:
        self._loop.call_soon_threadsafe(self._lost, job_id, attempt)

    def _lost(self, job_id: str, attempt: int) -> None:
        if self._held.lose(job_id, attempt):
            self._keeper.drop(job_id)
            get_logger().warning("lease lost; its attempt is cancelled", job=job_id, attempt=attempt)

    async def _drain(self) -> None:
        await self._put_back()
        until = time.monotonic() + self._settings.drain_s
        while self._held and self._broken is None and (left := until - time.monotonic()) > 0:
            self._role.status.waiting(f"{self._held.running} running sequences to end (draining)")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._wake.wait()
        await self._committer.flush()

    async def _hand_back(self) -> None:
        """Return all that is still ours, without blame."""
        held = self._held.take_back(started=True)
        await self._committer.flush()  # what ended since the drain; a job with a commit in hand is not held
        await self._queue.release([each.claim for each in held])

    async def _put_back(self) -> None:
        """Return the jobs of which nothing was started: nobody is to blame for it."""
        back = [held.claim for held in self._held.take_back(started=False)]
        for claim in back:
            self._keeper.drop(claim.job_id)
        await self._queue.release(back)


def _timings(claim: Claim, started: float) -> dict[str, float]:
    now = time.time()
    return {
        "enqueued_at": claim.enqueued_at,
        "queue_s": round(started - claim.enqueued_at, 4),
        "decode_s": round(now - started, 4),
        "finished_at": now,
    }
