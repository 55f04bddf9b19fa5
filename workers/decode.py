"""The queue worker: a LeasedWorker that splits each job into sequences and decodes the missing ones.

    claim ──▶ held jobs ──▶ a task per sequence ──▶ backend.decode ──▶ committer (one script call per tick)

| waits for        | unblocked by                  |
|------------------|-------------------------------|
| jobs             | producer                      |
| room (held.py)   | a sequence that ends          |
| new weights      | their files, the engine's step |

- A sequence that cannot be decoded, or whose prompt cannot be made, ends its job as dead letters; its neighbours go on.
- A little more is claimed than the engine decodes at once, so that it never waits for the queue. What was not
  started is put back at once on stop.
- New weights are loaded between two tokens; running sequences go on under them.
- What a running sequence has so far is stored every `checkpoint_tokens`; the next attempt is given it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from typing import Any

from pipeline.errors import RequestError
from pipeline.jobs import Claim, Claimed, Finished, LeasedWorker, Piece, func
from pipeline.run.role import Role
from pipeline.wire.messages import DecodeJob, Progress
from workers.generation.contracts import Backend
from workers.held import HeldJob, HeldJobs
from workers.job_prompts import JobPrompt, JobPrompts
from workers.memory import resident_bytes
from workers.sequences import delta_of, request_for, result_of
from workers.weights_watch import WeightsWatch

_TOO_EARLY_S = 0.5  # a job that wants newer weights than these comes again after it


class DecodeWorker(LeasedWorker):
    """One engine on the queue."""

    def __init__(self, role: Role, backend: Backend, prompts: JobPrompts) -> None:
        super().__init__(
            [func(self._ping, name="ping")],
            client=role.client,
            keys=role.keys,
            config=role.config,
            name=role.name,
            stop=role.stop,
            handle_signals=False,
        )
        self._role, self._backend, self._prompts = role, backend, prompts
        self._weights = WeightsWatch(role, backend)
        self._looked = False
        self._held = HeldJobs(self.settings.max_batch)
        role.status.fact(owner=self.queue.owner)

    async def run(self) -> None:  # type: ignore[override]
        """Serve until asked to stop; raises EngineError when the engine cannot go on."""
        self._role.spawn(self._wake_on_stop())
        await self._role.status.beat()  # from now on a supervisor can tell whose leases end with this process
        await self.main()

    def progress(self) -> float:
        """The engine's last step."""
        return self._backend.progress()

    def room(self) -> int:
        """Sequences worth claiming."""
        return self._held.room()

    def num_held(self) -> int:
        """Jobs, plain calls included."""
        return len(self._held) + super().num_held()

    def holds(self, job_id: str) -> bool:
        """As a decode job or as a plain call."""
        return job_id in self._held or super().holds(job_id)

    def is_busy(self) -> bool:
        """The engine has a whole batch."""
        return self._held.full()

    def served(self) -> list[str]:
        """Names of the functions."""
        return ["decode", *super().served()]

    async def before_claim(self) -> bool:
        """New weights go first."""
        if not self._looked:
            await self._weights.look()
            self._looked = True
        newer = self._weights.newer()
        if newer is not None:
            self._role.status.waiting(f"weights v{newer} to load, amid {self._held.running} running sequences")
            await self._weights.pull(newer)
        await self._weights.prove()
        return True

    def after_claim(self, got: Claimed) -> None:
        """The answer carries the newest version's number."""
        self._weights.saw(got.latest)

    async def accept(self, claim: Claim) -> None:
        """Render the prompt and start what fits into the engine."""
        job = claim.job
        if job is None:
            await super().accept(claim)
            return
        if job.min_weight_version > self._backend.version:
            self.keeper.drop(claim.job_id, claim.attempt)
            await self.queue.release([claim], delay_s=_TOO_EARLY_S)
            return
        if too_new := self._too_new(job):
            await self._fail(claim, "stale", too_new)
            return
        try:
            prompt = self._prompt(job)
        except RequestError as error:
            await self._refuse(claim, error)
            return
        missing = deque(index for index in range(job.n) if index not in claim.committed)
        self._held.add(HeldJob(claim, job, prompt, missing))
        if isinstance(prompt, asyncio.Task):
            prompt.add_done_callback(lambda _: self._held.fill(self._sequence_task))
        self._held.fill(self._sequence_task)

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel a job's sequences."""
        return self._held.lose(job_id, attempt) or super().lose(job_id, attempt)

    def take_back(self, *, started: bool) -> list[Claim]:
        """The claims of the jobs that are given up here."""
        return [held.claim for held in self._held.take_back(started=started)] + super().take_back(started=started)

    def report(self) -> None:
        """What this worker waits for, and its numbers."""
        running, status = self._held.running, self._role.status
        if self.stop.is_set():
            status.waiting(f"{running} running sequences to end (draining)")
        elif self.runs_apart() and running:
            status.waiting(f"{running} running sequences to end: they, or the next ones, run apart from others")
        else:
            fetching = self._held.fetching()
            cause = f"the prompts of {fetching} jobs" if fetching else "jobs (none is ready)"
            status.waiting(None if running else cause)
        status.fact(
            version=self._backend.version,
            running=running,
            sequences=self.committer.sequences,
            tokens=self.committer.tokens,
            engine=f"{self._backend.facts.name} {self._backend.facts.engine_version}",
        )
        if self._backend.facts.repeat_terminate:
            status.fact(repeat_terminate="on")

    async def heart_beat(self) -> None:
        """Now and then, unlike `report`."""
        self._role.status.fact(memory_bytes=resident_bytes())
        await super().heart_beat()

    async def _ping(self, ctx: dict[Any, Any]) -> dict[str, Any]:
        """For `enqueue_job("ping")`: which worker answers, with which weights."""
        return {"worker": self._role.name, "version": self._backend.version, "running": self._held.running}

    async def _wake_on_stop(self) -> None:
        await self.stop.wait()
        self.wake.set()

    async def _refuse(self, claim: Claim, error: RequestError) -> None:
        trace = "".join(traceback.format_exception(error)) if error.__cause__ else ""
        await self._fail(claim, "invalid_request", str(error), trace)

    async def _fail(self, claim: Claim, reason: str, detail: str, trace: str = "") -> None:
        called = claim.job is not None and claim.job.reply_to  # whoever asked is told, and needs no dead letter
        await self.queue.fail(claim, reason, detail, trace, "dropped" if called else "dead")
        self.keeper.drop(claim.job_id, claim.attempt)
        self._held.lose(claim.job_id, claim.attempt)  # last: it cancels the sequence that this may run in

    def _prompt(self, job: DecodeJob) -> JobPrompt | asyncio.Task[JobPrompt]:
        """Rendered, and its image fetched, beside what else goes on, once for all sequences of the job."""
        if not job.messages and not job.images:
            return self._prompts.text(job, self._backend.facts)
        return self.loop.create_task(self._prompts.make(job, self._backend.facts))

    def _too_new(self, job: DecodeJob) -> str:
        """Why these weights may not begin a sequence of the job, or nothing."""
        most, serves = job.max_weight_version, self._backend.version
        return "" if most is None or serves <= most else f"it asks for weights v{most} at most, and v{serves} serves"

    def _sequence_task(self, held: HeldJob, index: int) -> asyncio.Task[None]:
        task = self.loop.create_task(self._sequence(held, index))
        task.add_done_callback(lambda ended: self._sequence_ended(held, ended))
        return task

    async def _sequence(self, held: HeldJob, index: int) -> None:
        every, seed, claim = self.settings.checkpoint_tokens, self._role.config.seed, held.claim
        if too_new := self._too_new(held.job):  # weights may have come while it waited
            await self._fail(claim, "stale", too_new)
            return
        try:
            prompt = held.prompt if isinstance(held.prompt, JobPrompt) else held.prompt.result()
            request = request_for(claim, held.job, prompt, index, seed=seed, every=every, on_progress=self._store)
            output = await self._backend.decode(request)
        except RequestError as error:
            await self._refuse(claim, error)
            return
        facts, name = self._backend.facts, self._role.name
        result = result_of(claim, held.job, request, output, facts=facts, worker=name, truncated=prompt.truncated)
        times = result.timings
        self._role.telemetry.observe(sluice_queue_seconds=times["queue_s"], sluice_decode_seconds=times["decode_s"])
        self.committer.put(Finished(claim, result))

    def _store(self, claim: Claim, index: int, progress: Progress) -> None:
        """From the decode thread."""
        delta = delta_of(claim, index, progress)
        self.loop.call_soon_threadsafe(self.committer.store, Piece(claim, index, progress, delta))

    def _sequence_ended(self, held: HeldJob, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.broken = task.exception()  # its job stays held, to be handed back with blame
            self.wake.set()
            return
        if self._held.end(held, task):
            self.ended(held.claim)
        elif self.more and self._held.room() > 0:
            self.wake.set()
        self._held.fill(self._sequence_task)
