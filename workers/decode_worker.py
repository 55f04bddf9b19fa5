"""The decode worker: splits each leased job into sequences and decodes the missing ones.

    claim ──▶ slots ──▶ a task per sequence ──▶ backend.decode ──▶ committer (one script call per tick)

| waits for                                | unblocked by                  |
|------------------------------------------|-------------------------------|
| jobs                                     | a producer                    |
| slots (slots.py)                         | a sequence that ends          |
| new weights, if idle or for a pinned job | file loads, the engine's step |
| results, before the rest of a job ends   | the committer's next tick     |

- A job whose prompt can't be rendered ends as dead letters. A sequence that can't be decoded becomes one too, once the
  others of its job are committed. Other jobs continue.
- Weights may change while a sequence waits. If they are too new to begin it, it becomes such a dead letter; if they are
  too old (a pinned job came), it goes back, once the others of its job are committed.
- A job whose images can't be reached now (a mount, a server, a busy host) goes back to the queue, `images.tries` times.
  Until this worker reaches images again it tries one such job every 2 s, and leaves the others to other workers.
- The worker claims slightly more than the engine decodes at once, so the engine never waits for the queue. On stop,
  jobs that haven't started go back at once.
- New weights are loaded beside the claims, and by the engine beside its steps where it can; they change between two
  tokens, and running sequences continue under them. A worker with nothing to decode loads them before it claims.
- In a deterministic run a job accepts one version, which is loaded before it starts; nothing else is.
- A job with a pinned version is decoded wholly under it: the worker loads it, if need be in place of a newer one, and
  keeps it until the last such job here has ended. What else it decodes meanwhile is sampled from that version too.
  One whose version can't be loaded here now goes back, `weights.tries` times, for other workers to take.
- A running sequence's progress is stored every `checkpoint_tokens`, and when it is handed back; the next attempt starts
  from it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from sluice.pipeline.errors import RequestError, TornWeights, WeightsError, WeightsGone
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import (
    ArqFunctions,
    Claim,
    Claimed,
    Finished,
    Hooks,
    LeasedWorker,
    Piece,
    arq_settings,
    backoff_s,
    func,
    seed_for,
)
from sluice.pipeline.run.role import Role
from sluice.pipeline.weights.carriers import Carrier
from sluice.pipeline.wire.messages import (
    NO_LOGPROBS,
    VERSION_GONE,
    DecodeJob,
    ImageRef,
    Progress,
    Reshaped,
    SamplingParams,
    SequenceResult,
    TokenDelta,
    encode,
)
from sluice.pipeline.wire.tokens import TokenArray
from sluice.pipeline.wire.waits import WaitKind
from sluice.workers.engine.adapters import not_served
from sluice.workers.engine.contracts import Backend, EngineFacts, SequenceOutput, SequenceRequest, WrongVersion
from sluice.workers.fair_share import Turns, cost_of
from sluice.workers.guard.repeat import triggers
from sluice.workers.job_prompts import JobPrompt, JobPrompts
from sluice.workers.slots import HeldJob, Refusal, Slots
from sluice.workers.weights_watch import WeightsWatch

_LOOK_FOR_IMAGES_S = 2.0  # between jobs of a worker that reaches no images
_LOAD_AGAIN_S = 2.0  # between a worker's tries of a pinned version that it couldn't load
_PARK_S = 2.0  # until the engine has ended its sequences
_TOO_EARLY_S = 0.5  # delay of a job that needs newer weights than the loaded ones
_SAY_EVERY_S = 10.0  # that jobs go back


class DecodeWorker:
    """One engine on the queue: the Holder of decode jobs; also answers plain calls (`ping`)."""

    def __init__(
        self,
        role: Role,
        backend: Backend,
        prompts: JobPrompts,
        carrier: Carrier | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`carrier`: by default that of the run's configuration. `turns`: of the runs that share the engine."""
        self._role, self._backend, self._prompts = role, backend, prompts
        self._weights = WeightsWatch(role, backend, carrier)
        self._looked = False
        self._may_decode = True  # the loaded weights are known to be a version's
        self._has_more = False  # jobs were ready at the last claim
        self._loading: asyncio.Task[bool] | None = None  # newer weights, while sequences run
        self._pinned = False  # there were pinned jobs at the last claim
        self._not_loaded: tuple[int, float] = (-1, 0.0)  # pinned version, monotonic seconds of the last failure
        self._said_at = float("-inf")  # monotonic seconds
        self._images_away_at: float | None = None  # monotonic seconds of the last failure; None: images are reached
        self._slots = Slots(role.config.worker.max_batch)
        place: dict[str, Any] = {"client": role.client, "keys": role.keys, "config": role.config}
        polls: dict[str, Any] = {} if turns is None else turns.polls(role.config.worker.poll_s)
        self.leases = LeasedWorker(**place, **polls, name=role.name, stop=role.stop)
        self._turn = turns and turns.join(role.config.run, self.leases.wake.set, lambda: len(self.held()))
        arq = arq_settings([func(self._ping, name="ping")], **place)
        self._calls = ArqFunctions(self.leases, arq, others=("decode",))
        role.status.fact(owner=self.leases.queue.owner)

    async def run(self) -> None:
        """Serve until asked to stop; raises EngineError when the engine fails."""
        self._role.spawn(self._wake_on_stop())
        await self._role.status.beat()  # from now on, a supervisor knows which leases to end if this process dies
        hooks = Hooks(
            progress=self._backend.progress,
            is_busy=self._slots.full,
            beat=self._calls.beat,
            before_claim=self._update_weights,
            before_hand_back=self._park,
            after_claim=self._claimed,
            each_turn=self._each_turn,
            turn=self._turn,
        )
        try:
            await self.leases.serve(self, hooks)
        finally:
            if self._loading is not None:
                self._loading.cancel()
                await asyncio.wait([self._loading])
            await asyncio.to_thread(self._weights.close)
            await self._calls.close()

    def room(self) -> int:
        """Number of sequences worth claiming."""
        room = self._own_room()
        return room if self._turn is None else min(room, self._turn.room())

    def _own_room(self) -> int:
        """Whatever other runs on this engine do."""
        room = self._slots.room() if self._may_decode else 0
        if self._images_away_at is None:
            return room
        # Jobs come back at once from a host without images: with all its room it would use up the tries of the whole
        # queue, while workers that could decode them are busy.
        due = time.monotonic() - self._images_away_at >= _LOOK_FOR_IMAGES_S and not self._slots.fetching()
        return min(room, 1) if due else 0

    def held(self) -> Collection[str]:
        """Ids of jobs, including plain calls."""
        return self._slots.held() | self._calls.held()

    async def accept(self, claim: Claim) -> None:
        """Render the prompt and start as many sequences as the engine takes."""
        job = claim.job
        if self._turn is not None and self._turn.is_barred(alone=claim.alone):
            await self.leases.give_back(claim, _TOO_EARLY_S)
            return
        if job is None:
            await self._calls.accept(claim)
            return
        if self._role.config.deterministic and not await self._has_switched(claim, job):
            return
        if job.adapter not in self._backend.versions:
            error = RequestError(not_served(job.adapter, sorted(self._backend.versions)[1:]))
            await self._fail(claim, *refusal_of(error))
            return
        if job.min_weight_version > self._backend.versions[job.adapter]:
            await self.leases.give_back(claim, _TOO_EARLY_S)
            return
        if job.pinned_version is not None and not await self._pin(claim, job.pinned_version):
            return
        try:
            prompt = self._prompt(job)
        except RequestError as error:
            await self._fail(claim, *refusal_of(error))
            return
        missing = deque(index for index in range(job.n) if index not in claim.committed)
        self._slots.add(HeldJob(claim, job, prompt, missing))
        if isinstance(prompt, asyncio.Task):
            prompt.add_done_callback(lambda _: self._slots.fill(self._sequence_task))
        self._slots.fill(self._sequence_task)

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel a job's sequences, or a plain call."""
        return self._slots.lose(job_id, attempt) or self._calls.lose(job_id, attempt)

    def take_back(self, *, started: bool) -> list[Claim]:
        """The claims of the jobs this worker gives up."""
        slots = [held.claim for held in self._slots.take_back(started=started)]
        return slots + self._calls.take_back(started=started)

    async def _pin(self, claim: Claim, version: int) -> bool:
        """Whether a job of this version can start here now. If not, it went back to the queue, or has ended."""
        await self._settled()  # or newer weights would arrive in its middle
        if self._backend.version == version:
            return True
        if self._slots.pinned() is not None:  # another one, which stays until its jobs have ended
            await self.leases.give_back(claim, _TOO_EARLY_S)
            return False
        failed, failed_at = self._not_loaded
        if failed == version and (left_s := failed_at + _LOAD_AGAIN_S - time.monotonic()) > 0:
            await self.leases.give_back(claim, left_s)  # one failure here uses up one job's try, not every job's
            return False
        self._role.status.waiting(WaitKind.WEIGHTS, f"v{version}", self._slots.running)
        try:
            await self._weights.pin(version)
        except TornWeights:
            raise
        except WeightsGone as error:
            await self._fail(claim, VERSION_GONE, str(error))
            return False
        except WeightsError as error:
            self._not_loaded = version, time.monotonic()
            await self._try_later(claim, "weights", self._role.config.weights.tries, error)
            return False
        return True

    async def _update_weights(self) -> None:
        """Newer weights: awaited if nothing runs, else loaded beside the claims."""
        if not self._looked:
            await self._weights.look()
            self._looked = True
        # After the last pinned job there is one more claim before the swap: it may bring the next one.
        was_pinned, self._pinned = self._pinned, self._slots.pinned() is not None
        if self._pinned or was_pinned or (self._loading is not None and not self._loading.done()):
            return
        await self._settled()
        newer = None if self._role.config.deterministic else self._weights.newer()
        if newer is not None:
            self._role.status.waiting(WaitKind.WEIGHTS, f"v{newer}", self._slots.running)
            self._loading = asyncio.create_task(self._weights.pull(newer))
            if self._slots.running:
                return
            await self._settled()
        self._may_decode = await self._weights.prove() or self._role.config.deterministic  # whose jobs name a version
        self._role.start.ended("weights")

    async def _settled(self) -> None:
        """Wait for a load under way. Raises TornWeights."""
        loading, self._loading = self._loading, None
        if loading is not None:
            await loading

    async def _has_switched(self, claim: Claim, job: DecodeJob) -> bool:
        """Whether the one version that the job accepts is loaded now; else its claim is handed back, or ended."""
        version = job.min_weight_version
        if version == self._backend.version or version != job.max_weight_version:
            return True
        self._role.status.waiting(WaitKind.WEIGHTS, f"v{version}")
        if not self._slots.held() and await self._weights.pull(version):
            return True
        if await self._weights.is_gone(version):
            await self._fail(claim, "stale", f"only weights v{version} may decode it, and they are retired")
        else:
            await self.leases.give_back(claim, _TOO_EARLY_S)
        return False

    def _claimed(self, got: Claimed) -> None:
        self._weights.saw(got.latest)
        if got.claims:
            self._role.start.ended("claim")
        if self._turn is not None:
            self._has_more = got.more
            taken = sum(claim.job.n - len(claim.committed) for claim in got.claims if claim.job is not None)
            apart = got.must_drain or any(claim.alone for claim in got.claims)
            # Without images or weights of its own it takes none of the others' time.
            can_go_on = (self._may_decode and self._images_away_at is None) or self._own_room() > 0
            self._turn.answered(taken, more=got.more and can_go_on, apart=apart)

    def _each_turn(self) -> None:
        """Update the status (what this worker waits for) and its metrics."""
        self._calls.end_overdue()
        if self._turn is not None:
            self._turn.holds(self._slots.sequences())
        running, status, facts = self._slots.running, self._role.status, self._backend.facts
        if self.leases.stop.is_set():
            status.waiting(WaitKind.DRAIN, "running sequences", running)
        elif self.leases.runs_apart() and running:
            status.waiting(WaitKind.ISOLATION, count=running)
        elif running:
            status.waiting(None)
        elif fetching := self._slots.fetching():
            status.waiting(WaitKind.PROMPTS, count=fetching)
        elif not self._may_decode:
            status.waiting(WaitKind.WEIGHTS, f"newer than v{self._backend.version}")
        elif self._has_more and self._turn is not None and self._turn.room() == 0:
            status.waiting(WaitKind.SHARE)
        else:
            status.waiting(WaitKind.JOBS)
        status.fact(
            version=self._backend.version,
            running=running,
            sequences=self.leases.committer.sequences,
            tokens=self.leases.committer.tokens,
            engine=f"{facts.name} {facts.engine_version}",
        )
        if facts.repeat_terminate:
            status.fact(repeat_terminate="on")
        if facts.supports_vlm:
            status.fact(images_fetched=self._prompts.images_fetched, images_processed=self._backend.images_processed)

    async def _ping(self, ctx: dict[Any, Any]) -> dict[str, Any]:
        """For `enqueue_job("ping")`: which worker answers, and with which weights."""
        return {"worker": self._role.name, "version": self._backend.version, "running": self._slots.running}

    async def _wake_on_stop(self) -> None:
        await self.leases.stop.wait()
        self.leases.wake.set()

    async def _give_back(self, held: HeldJob, cause: SourceUnavailable) -> None:
        """To the queue, to try its images again later."""
        self._images_away_at = time.monotonic()
        if held.given_back:  # by another of its sequences
            return
        held.given_back = True
        await self._try_later(held.claim, "images", self._role.config.images.tries, cause, cause.after_s)

    async def _try_later(
        self, claim: Claim, what: Literal["images", "weights"], most: int, cause: Exception, after_s: float = 0.0
    ) -> None:
        """To the queue, since `what` isn't within reach here; what it has left is dead after the last try."""
        tries = claim.tries + 1
        if tries >= most:
            await self._fail(claim, f"{what}_unavailable", f"{cause} (tried {tries} times, {what}.tries)")
            return
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            get_logger().warning(
                f"{what} can't be reached; jobs go back", job=claim.job_id, tries=tries, cause=str(cause)
            )
        await self.leases.give_back(claim, max(backoff_s(tries), after_s), tried=True)
        self._slots.lose(claim.job_id, claim.attempt)  # last: as in `_fail`

    async def _fail(self, claim: Claim, reason: str, detail: str, trace: str = "") -> None:
        called = claim.job is not None and claim.job.reply_to  # the caller gets the answer, so there's no dead letter
        await self.leases.fail(claim, reason, detail, trace, "dropped" if called else "dead")
        self._slots.lose(claim.job_id, claim.attempt)  # last: it cancels the sequence this may be running in

    def _prompt(self, job: DecodeJob) -> JobPrompt | asyncio.Task[JobPrompt]:
        """Rendered in the background, including the images, once for all sequences of the job."""
        if not job.messages and not job.images:
            return self._prompts.text(job, self._backend.facts)
        return asyncio.get_running_loop().create_task(self._prompts.make(job, self._backend.facts))

    def _sequence_task(self, held: HeldJob, index: int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._sequence(held, index))
        task.add_done_callback(lambda ended: self._sequence_ended(held, ended))
        return task

    async def _sequence(self, held: HeldJob, index: int) -> None:
        every, seed, claim = self.leases.settings.checkpoint_tokens, self._role.config.seed, held.claim
        try:
            prompt = held.prompt if isinstance(held.prompt, JobPrompt) else held.prompt.result()
            request = request_for(claim, held.job, prompt, index, seed=seed, every=every, on_progress=self._store)
        except SourceUnavailable as error:
            await self._give_back(held, error)
            return
        except RequestError as error:
            await self._fail(claim, *refusal_of(error))
            return
        if prompt.images:
            self._images_away_at = None
        try:
            output = await self._backend.decode(request)
        except RequestError as error:
            if isinstance(error, WrongVersion) and error.too_old:
                held.too_early = True
            else:
                held.refusal = held.refusal or refusal_of(error)
        else:
            if held.parked and output.finish_reason == "cancelled":
                return  # its last piece of progress is on its way to the committer
            self._commit(held, prompt, request, output)
        held.left -= 1
        if not held.left and (held.too_early or held.refusal is not None):
            await self._end_rest(held)

    async def _end_rest(self, held: HeldJob) -> None:
        """Its sequences are over: those without a result become dead letters, or go back."""
        committed = asyncio.Event()
        self.leases.committer.when_flushed(committed.set)
        await committed.wait()  # the others would share their end
        if held.refusal is not None and not held.too_early:
            await self._fail(held.claim, *held.refusal)
            return
        await self.leases.give_back(held.claim, _TOO_EARLY_S)
        self._slots.lose(held.claim.job_id, held.claim.attempt)  # last: as in `_fail`

    def _commit(self, held: HeldJob, prompt: JobPrompt, request: SequenceRequest, output: SequenceOutput) -> None:
        """Its result goes out with the next tick."""
        claim, facts, name = held.claim, self._backend.facts, self._role.name
        usual, cut = self._role.config.sampling, prompt.truncated
        if self._turn is not None:
            new = len(output.sampled) - (len(request.so_far) if request.so_far else 0)
            self._turn.ended(cost_of(max(0, new), len(output.prompt_token_ids) - output.cached_tokens))
        result = result_of(claim, held.job, request, output, facts=facts, worker=name, truncated=cut, usual=usual)
        times = result.timings
        if not held.job.adapter and (behind_s := self._weights.behind_s(result.versions)) is not None:
            times["behind_s"] = behind_s
        if prompt.images:
            times |= {"images_at": prompt.images_at, "images_s": prompt.images_s}
        took = {"sluice_queue_seconds": times["queue_s"], "sluice_decode_seconds": times["decode_s"]}
        self._role.telemetry.observe(result.trace, **took)
        self.leases.committer.put(Finished(claim, result))
        self._say_started(output.first_token_at)

    def _say_started(self, first_token_at: float | None) -> None:
        """With the first sequence that ends: how long this process took to its first token."""
        start = self._role.start
        if "first_token" in start.parts or not first_token_at:
            return
        start.ended("first_token", first_token_at)
        self._role.status.fact(start_s=start.parts)
        get_logger().info("started", seconds=round(sum(start.parts.values()), 2), **start.parts)

    def _store(self, claim: Claim, index: int, progress: Progress) -> None:
        """Called from the decode thread."""
        delta = delta_of(claim, index, progress)
        self.leases.store(Piece(claim, index, progress, delta))

    async def _park(self) -> None:
        """End the running sequences and store what they have, so that nothing of them is decoded again."""
        parked = self._slots.park()
        for held in parked:
            for index in range(held.job.n):
                self._backend.abort(f"{held.claim.job_id}:{index}")
        if tasks := [task for held in parked for task in held.tasks]:
            await asyncio.wait(tasks, timeout=_PARK_S)

    def _sequence_ended(self, held: HeldJob, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.leases.broke(error)  # its job stays held and is handed back with blame
            return
        if held.parked:
            return  # likewise, without
        if self._slots.end(held, task):
            self.leases.ended(held.claim)
        else:
            self.leases.freed()
        self._slots.fill(self._sequence_task)


def refusal_of(error: RequestError) -> Refusal:
    """Why a job, or one of its sequences, isn't decoded."""
    reason = "stale" if isinstance(error, WrongVersion) else "invalid_request"
    return Refusal(reason, str(error), "".join(traceback.format_exception(error)) if error.__cause__ else "")


OnProgress = Callable[[Claim, int, Progress], None]


def request_for(
    claim: Claim, job: DecodeJob, prompt: JobPrompt, index: int, *, seed: int, every: int, on_progress: OnProgress
) -> SequenceRequest:
    """The engine request; it continues from the tokens an earlier attempt decoded.

    `seed` is the run's, for jobs without one. Progress is reported every `every` tokens (0 = never), and as often as
    the job's caller asked for deltas.
    """
    if is_streamed(job):
        every = min(every or job.stream_every, job.stream_every)

    sampling, stored, pin = job.sampling, claim.progress.get(index), job.pinned_version
    return SequenceRequest(
        seq_key=f"{claim.job_id}:{index}",
        prompt_token_ids=tuple(prompt.token_ids),
        sampling=sampling,
        seed=seed_for(seed if sampling.seed is None else sampling.seed, "" if job.seeded else claim.job_id, index),
        adapter=job.adapter,
        first_under=(job.min_weight_version, job.max_weight_version) if pin is None else (pin, pin),
        images=prompt.images,
        so_far=None if stored is None else stored.sampled,
        deadline_at=claim.deadline_at,
        report_every=every,
        report=(lambda piece: on_progress(claim, index, piece)) if every else None,
        asked_at=time.time(),
        goes_on=job.rollout_id is not None,
    )


def is_streamed(job: DecodeJob) -> bool:
    """Whether the caller gets each stored piece as a delta."""
    return bool(job.reply_to) and job.stream_every > 0


def delta_of(claim: Claim, index: int, progress: Progress) -> bytes:
    """One piece as the job's caller sees it, encoded; empty unless the caller asked for deltas."""
    if claim.job is None or not is_streamed(claim.job):
        return b""
    delta = TokenDelta(
        seq_id=f"{claim.job_id}:{index}",
        offset=progress.offset,
        token_ids=progress.token_ids,
        logprobs=progress.logprobs,
        ranked=progress.ranked,
    )
    return encode(delta)


def result_of(
    claim: Claim,
    job: DecodeJob,
    request: SequenceRequest,
    output: SequenceOutput,
    *,
    facts: EngineFacts,
    worker: str,
    truncated: int = 0,
    usual: SamplingParams | None = None,
) -> SequenceResult:
    """The sequence as sent to the consumers; `truncated` tokens were cut from its prompt.

    `usual`: the run's sampling, from which a job's may differ.
    """
    index = int(request.seq_key.rpartition(":")[2])
    return SequenceResult(
        seq_id=request.seq_key,
        group_id=claim.job_id,
        group_size=job.n,
        index=index,
        rollout_id=job.rollout_id,
        turn=job.turn,
        reply_to=job.reply_to,
        attempt=claim.attempt,
        worker=worker,
        adapter=job.adapter,
        backend=output.fallback.get("used", facts.name),
        engine_version=output.fallback.get("version", facts.engine_version),
        prompt_token_ids=TokenArray(output.prompt_token_ids),
        prompt_truncated=truncated,
        **output.sampled.columns(),
        ranked=output.sampled.as_ranked(),
        prompt_ranked=output.prompt_ranked,
        cached_tokens=output.cached_tokens,
        resumed_tokens=min(len(request.so_far), len(output.sampled)) if request.so_far else 0,
        text=output.text,
        raw_text=output.raw_text,
        logprobs_mode=facts.logprobs_mode if job.sampling.logprobs else NO_LOGPROBS,
        keeps_cache=facts.keeps_cache,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        triggers=triggers(output.trigger, active=facts.repeat_terminate),
        sampling=job.sampling,
        reshaped=[] if usual is None or not job.sampling.reshapes(usual) else [_reshaped(job.sampling, output, facts)],
        timings=_timings(claim, request.asked_at, output.first_token_at),
        trace=job.trace,
        truth=job.truth,
        images=stamped(job.images, request.images),
        task=job.task,
        metadata={**job.metadata, "fallback": output.fallback} if output.fallback else job.metadata,
        messages=job.messages if job.keep_messages else [],
    )


def stamped(refs: Sequence[ImageRef], images: Sequence[Any]) -> list[ImageRef]:
    """The references with the digests of the bytes that were decoded: who looks later sees the same, or an error."""
    if not images:
        return list(refs)
    digests = [image.info.get("sha256") for image in images]
    return [
        msgspec.structs.replace(ref, sha256=digest or ref.sha256) for ref, digest in zip(refs, digests, strict=True)
    ]


def _reshaped(sampling: SamplingParams, output: SequenceOutput, facts: EngineFacts) -> Reshaped:
    library = "" if sampling.grammar is None else facts.grammars
    return Reshaped(start=0, end=len(output.token_ids), sampling=sampling, library=library)


def _timings(claim: Claim, started: float, first_token_at: float) -> dict[str, float]:
    now = time.time()
    found = {
        "enqueued_at": claim.enqueued_at,
        "queue_s": round(started - claim.enqueued_at, 4),
        "decode_s": round(now - started, 4),
        "finished_at": now,
    }
    return found | {"first_token_s": round(first_token_at - started, 4)} if first_token_at else found
