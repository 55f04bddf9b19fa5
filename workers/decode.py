"""The queue worker: claims jobs, decodes their missing sequences, commits each one as it ends.

    claim loop ──▶ a task per sequence ──▶ backend.decode ──▶ committer (one script call per tick)

| waits for        | unblocked by                  |
|------------------|-------------------------------|
| jobs             | producer                      |
| room in the batch| a sequence that ends          |
| running sequences| before new weights are loaded |

- A sequence that cannot be decoded ends its job as dead letters; its neighbours go on.
- On stop: no more claims, finish within `drain_s`, hand the rest back without blame.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pipeline.errors import EngineError, RequestError
from pipeline.jobs import Claim, Finished, JobQueue, seed_for
from pipeline.lifecycle import Role
from pipeline.logs import get_logger
from pipeline.messages import DecodeJob, SequenceResult
from pipeline.tokens import FloatArray, Runs, TokenArray
from workers.committer import Committer
from workers.generation.contracts import Backend, SequenceOutput, SequenceRequest
from workers.generation.prompts import PromptRenderer
from workers.lease import LeaseKeeper
from workers.weights_watch import WeightsWatch


class DecodeWorker:
    """One engine on the queue."""

    def __init__(self, role: Role, backend: Backend, prompts: PromptRenderer) -> None:
        self._role, self._backend, self._prompts = role, backend, prompts
        self._settings = role.config.worker
        partitions = role.config.consumer.count
        self._queue = JobQueue(role.client, role.keys, partitions=partitions, worker=role.name)
        self._committer = Committer(self._queue)
        self._weights = WeightsWatch(role, backend)
        self._running: dict[str, tuple[Claim, set[asyncio.Task[None]]]] = {}
        self._loop = asyncio.get_running_loop()
        self._keeper = LeaseKeeper(role.config, self._queue, backend.progress, self._lost_from_thread)
        self._broken: BaseException | None = None

    async def run(self) -> None:
        """Serve until asked to stop; raises EngineError when the engine cannot go on."""
        self._keeper.start()
        self._role.spawn(self._committer.run())
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
        if newer is not None and not self._running:
            await self._weights.pull(newer)
            newer = None
        room = 0 if newer is not None else self._settings.max_batch - self._sequences()
        claims: list[Claim] = []
        if room > 0:
            claims = await self._queue.claim(room, self._settings.lease_s, self._settings.max_attempts)
        for claim in claims:
            await self._start(claim)
        self._report(newer)
        if not claims:
            await self._role.nap(0.01 if self._running else self._settings.poll_s)

    def _check_health(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._keeper.stalled:
            raise EngineError(f"the engine made no progress for {self._settings.stall_timeout_s:.0f} s")

    def _report(self, newer: int | None) -> None:
        running = self._sequences()
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
        self._keeper.hold(claim)
        missing = [index for index in range(job.n) if index not in claim.committed]
        tasks = {self._loop.create_task(self._sequence(claim, job, prompt, index)) for index in missing}
        self._running[claim.job_id] = (claim, tasks)
        for task in tasks:
            task.add_done_callback(lambda ended, job_id=claim.job_id: self._ended(job_id, ended))

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

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
        entry = self._running.get(job_id)
        if entry is None:
            return
        entry[1].discard(task)
        if not entry[1]:
            del self._running[job_id]
            self._committer.when_flushed(lambda: self._keeper.drop(job_id))

    def _lost_from_thread(self, job_id: str) -> None:
        self._loop.call_soon_threadsafe(self._lost, job_id)

    def _lost(self, job_id: str) -> None:
        self._keeper.drop(job_id)
        entry = self._running.pop(job_id, None)
        if entry is not None:
            get_logger().warning("lease lost; its attempt is cancelled", job=job_id)
            for task in entry[1]:
                task.cancel()

    def _sequences(self) -> int:
        return sum(len(tasks) for _, tasks in self._running.values())

    async def _drain(self) -> None:
        tasks: list[asyncio.Task[Any]] = [task for _, group in self._running.values() for task in group]
        if tasks:
            self._role.status.waiting(f"{len(tasks)} running sequences to end (draining)")
            await asyncio.wait(tasks, timeout=self._settings.drain_s)
        await self._committer.flush()

    async def _hand_back(self) -> None:
        """Return what is still ours: nobody is to blame for a stop."""
        held = list(self._running.values())
        self._running.clear()
        for _, tasks in held:
            for task in tasks:
                task.cancel()
        await self._queue.release([claim for claim, _ in held])


def _timings(claim: Claim, started: float) -> dict[str, float]:
    now = time.time()
    return {
        "enqueued_at": claim.enqueued_at,
        "queue_s": round(started - claim.enqueued_at, 4),
        "decode_s": round(now - started, 4),
        "finished_at": now,
    }
