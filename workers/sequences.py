"""Between the queue's words and the engine's: a claim's sequence as a request, its output as a result."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.jobs import Claim, seed_for
from pipeline.wire.messages import DecodeJob, Progress, SequenceResult, TokenDelta, encode
from pipeline.wire.tokens import FloatArray, Runs, TokenArray
from workers.generation.contracts import EngineFacts, SequenceOutput, SequenceRequest, SequenceSoFar
from workers.guard.signal import triggers
from workers.job_prompts import JobPrompt

OnProgress = Callable[[Claim, int, Progress], None]


def request_for(
    claim: Claim, job: DecodeJob, prompt: JobPrompt, index: int, *, seed: int, every: int, on_progress: OnProgress
) -> SequenceRequest:
    """What an earlier attempt had decoded is where this one goes on.

    `seed` is the run's, for jobs that name none; progress is reported every `every` tokens (0 = never), and as often
    as the job's caller wants to see some.
    """
    if is_streamed(job):
        every = min(every or job.stream_every, job.stream_every)

    def report(so_far: SequenceSoFar) -> None:
        piece = Progress(
            offset=so_far.offset,
            token_ids=TokenArray(so_far.token_ids),
            logprobs=FloatArray(so_far.logprobs),
            versions=Runs.of(so_far.versions),
        )
        on_progress(claim, index, piece)

    sampling = job.sampling
    return SequenceRequest(
        seq_key=f"{claim.job_id}:{index}",
        prompt_token_ids=tuple(prompt.token_ids),
        sampling=sampling,
        seed=seed_for(seed if sampling.seed is None else sampling.seed, claim.job_id, index),
        image=prompt.image,
        so_far=_so_far(claim.progress.get(index)),
        deadline_at=claim.deadline_at,
        report_every=every,
        report=report if every else None,
        asked_at=time.time(),
    )


def is_streamed(job: DecodeJob) -> bool:
    """Whether its caller is told of each piece that is stored."""
    return bool(job.reply_to) and job.stream_every > 0


def delta_of(claim: Claim, index: int, progress: Progress) -> bytes:
    """What the job's caller sees of a piece, encoded; nothing when it does not want it."""
    if claim.job is None or not is_streamed(claim.job):
        return b""
    delta = TokenDelta(
        seq_id=f"{claim.job_id}:{index}",
        offset=progress.offset,
        token_ids=progress.token_ids,
        logprobs=progress.logprobs,
    )
    return encode(delta)


def _so_far(stored: Progress | None) -> SequenceSoFar | None:
    if stored is None:
        return None
    return SequenceSoFar(0, list(stored.token_ids), list(stored.logprobs), list(stored.versions))


def result_of(
    claim: Claim,
    job: DecodeJob,
    request: SequenceRequest,
    output: SequenceOutput,
    *,
    facts: EngineFacts,
    worker: str,
    truncated: int = 0,
) -> SequenceResult:
    """The sequence as it goes to the consumers; `truncated` tokens were cut from its prompt."""
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
        backend=output.fallback.get("used", facts.name),
        engine_version=output.fallback.get("version", facts.engine_version),
        prompt_token_ids=TokenArray(output.prompt_token_ids),
        prompt_truncated=truncated,
        token_ids=TokenArray(output.token_ids),
        resumed_tokens=min(len(request.so_far.token_ids), len(output.token_ids)) if request.so_far else 0,
        logprobs=FloatArray(output.logprobs),
        versions=Runs.of(output.versions),
        text=output.text,
        raw_text=output.raw_text,
        logprobs_mode=facts.logprobs_mode,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        proximal_logprobs=FloatArray(output.proximal_logprobs),
        proximal_versions=Runs.of(output.proximal_versions),
        response_mask=Runs.of(output.response_mask) if output.trigger else Runs(),
        triggers=triggers(output.trigger, active=facts.repeat_terminate),
        sampling=job.sampling,
        timings=_timings(claim, request.asked_at),
        truth=job.truth,
        images=job.images,
        task=job.task,
        metadata={**job.metadata, "fallback": output.fallback} if output.fallback else job.metadata,
    )


def _timings(claim: Claim, started: float) -> dict[str, float]:
    now = time.time()
    return {
        "enqueued_at": claim.enqueued_at,
        "queue_s": round(started - claim.enqueued_at, 4),
        "decode_s": round(now - started, 4),
        "finished_at": now,
    }
