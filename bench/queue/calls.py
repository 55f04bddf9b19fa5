"""What one client gets out of the queue's calls, with AOF everysec: bulk enqueue, commit by size, claim by length.

- Bulk enqueue: decode jobs with a chat prompt, 100 a call; they are made before the clock starts, encoded within it.
- Commit: results of real claims, several a call as the committer does, a call below 1 MB.
- Claim: one job from a short and from a long queue in turns; it is handed back outside the clock.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from statistics import median
from typing import Any

from msgspec.structs import replace

from sluice.bench.broker import CHUNK, IN_FLIGHT, chunks, enqueue, enqueue_calls, in_flight
from sluice.bench.harness import say, until
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import Call, Claim, Finished, JobQueue, job_id_for
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_MOST_PER_COMMIT = 256
_COMMIT_BYTES = 768 << 10
_LEASE_S = 600.0
_MOST_DEATHS = 3
_SETTLE_S = 60.0
_PROMPT = 64  # tokens of a result's prompt


def decode_job(run: str, number: int) -> DecodeJob:
    """As a producer makes it: a system prompt, a question, a truth."""
    sampling = SamplingParams(temperature=0.8, max_new_tokens=512, stop=("</answer>",))
    question = f"Problem {number}: a shop sells {number} apples and buys {7 * number % 100} more. How many are there?"
    return DecodeJob(
        run=run,
        job_id=job_id_for(run, str(number), 0, sampling, 1),
        messages=[
            {"role": "system", "content": "You are a careful mathematician. Explain step by step, then answer."},
            {"role": "user", "content": question},
        ],
        sampling=sampling,
        truth={"answer": number + 7 * number % 100},
        task="exact_answer",
        metadata={"row": number},
    )


def result_of(job_id: str, size: int) -> SequenceResult:
    """The only sequence of a job, as workers make it; encoded it takes about `size` bytes."""
    return replace(_result_template(size), seq_id=f"{job_id}:0", group_id=job_id)


@cache
def _result_template(size: int) -> SequenceResult:
    none, thousand = (len(encode(_result_with(count))) for count in (0, 1000))
    return _result_with(max(0, round((size - none) * 1000 / (thousand - none))))


def _result_with(count: int) -> SequenceResult:
    """Of `count` tokens, with a logprob and a word each."""
    return SequenceResult(
        seq_id="commit:" + "0" * 24 + ":0",
        group_id="commit:" + "0" * 24,
        group_size=1,
        index=0,
        worker="worker-0",
        backend="hf",
        prompt_token_ids=TokenArray(range(_PROMPT)),
        token_ids=TokenArray(range(count)),
        logprobs=FloatArray([-0.5] * count),
        versions=Runs.of([1] * count),
        text="word " * count,
        raw_text="word " * count,
        finish_reason="stop",
        sampling=SamplingParams(),
        task="exact_answer",
    )


async def bulk_enqueue(client: Any, count: int) -> dict[str, float]:
    """Jobs per second: several calls in flight, and one call after the other."""
    found: dict[str, float] = {}
    for name, most in (("bulk_enqueue_s", IN_FLIGHT), ("bulk_enqueue_one_by_one_s", 1)):
        queue = JobQueue(client, Keys(name))
        ready = list(chunks([decode_job(name, number) for number in range(count)]))
        started = time.perf_counter()
        await in_flight((enqueue(queue, chunk) for chunk in ready), most)
        found[name] = count / (time.perf_counter() - started)
    say(f"bulk enqueue: {found['bulk_enqueue_s']:.0f} jobs/s ({found['bulk_enqueue_one_by_one_s']:.0f} one by one)")
    return {**found, "bulk_job_bytes": len(encode(decode_job("bulk", count)))}


async def commits(client: Any, kilobytes: Sequence[int], at_least_s: float) -> dict[str, Any]:
    """Sequences per second, by KB of an encoded result."""
    rates, per_call, sizes = {}, {}, {}
    for size in kilobytes:
        most = max(1, min(_MOST_PER_COMMIT, _COMMIT_BYTES // (size << 10)))
        keys = Keys(f"commit-{size}")
        committed, seconds = 0, 0.0
        queue = JobQueue(client, keys)
        async for held in _claimed(queue, most):
            ended = [Finished(claim, result_of(claim.job_id, size << 10)) for claim in held]
            started = time.perf_counter()
            outcomes = await queue.commit(ended)
            seconds += time.perf_counter() - started
            if set(outcomes) != {"ok"}:
                raise BrokerError(f"commits of the bench were refused: {sorted(set(outcomes))}")
            await client.unlink(keys.result_stream("", 1))
            committed += len(ended)
            sizes[str(size)] = len(encode(ended[0].result))
            if seconds >= at_least_s:
                break
        rates[str(size)], per_call[str(size)] = committed / seconds, most
        say(f"commit of {size} KB: {rates[str(size)]:.0f} sequences/s, {most} a call")
    return {"commit_s": rates, "commit_per_call": per_call, "commit_bytes": sizes}


async def _claimed(queue: JobQueue, count: int) -> AsyncIterator[list[Claim]]:
    """Lists of `count` fresh claims, without end."""
    number = 0
    while True:
        await enqueue(queue, [decode_job(queue.keys.run, number + i) for i in range(count)])
        number += count
        found: list[Claim] = []
        while len(found) < count:
            found += (await queue.claim(count - len(found), _LEASE_S, _MOST_DEATHS)).claims
        yield found


async def claims(client: Any, depths: Sequence[int], count: int) -> dict[str, Any]:
    """Microseconds of one claim of one job, by the number of jobs in the queue."""
    queues = {depth: JobQueue(client, Keys(f"depth-{depth}")) for depth in depths}
    for depth, queue in queues.items():
        started = time.perf_counter()
        await in_flight(enqueue_calls(queue, _calls(queue, begin, depth)) for begin in range(0, depth, CHUNK))
        say(f"queue of {depth} jobs: filled in {time.perf_counter() - started:.1f} s")

    async def settled() -> bool:
        """A broker that rewrites its append-only file is slower than usual."""
        return not (await client.info("persistence"))["aof_rewrite_in_progress"]

    await until(settled, "the broker to rewrite its append-only file", _SETTLE_S)
    taken: dict[int, list[float]] = {depth: [] for depth in queues}
    for _ in range(count):
        for depth, queue in queues.items():
            started = time.perf_counter()
            got = await queue.claim(1, _LEASE_S, _MOST_DEATHS)
            taken[depth].append(1e6 * (time.perf_counter() - started))
            if await queue.release(got.claims) != 1:
                raise BrokerError("a claimed job of the bench could not be handed back")
    found = {str(depth): median(each) for depth, each in taken.items()}
    say("claim: " + ", ".join(f"{taken_us:.0f} us with {depth} jobs queued" for depth, taken_us in found.items()))
    return {"claim_us": found}


def _calls(queue: JobQueue, begin: int, depth: int) -> list[Call]:
    numbers = range(begin, min(begin + CHUNK, depth))
    return [Call(job_id=tagged(queue.keys.run, str(number)), function="noop") for number in numbers]
