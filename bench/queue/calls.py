"""What one client gets out of the queue's calls, with AOF everysec: bulk enqueue, commit by size, claim by length.

- Bulk enqueue: decode jobs with a chat prompt, 100 a call; they are made before the clock starts, encoded within it.
- Commit: results of real claims, several a call as the committer does, a call below 1 MB.
- Claim: one job from a short and from a long queue in turns; it is handed back outside the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from statistics import median
from typing import Any

from redis.asyncio import Redis

from sluice.bench.queue.in_flight import IN_FLIGHT, in_flight
from sluice.bench.queue.plan import Plan
from sluice.bench.queue.results import result_of
from sluice.bench.report import say
from sluice.pipeline.errors import BrokerError, DeadlineExceeded
from sluice.pipeline.queue import Call, Claim, Credit, Finished, JobQueue, job_id_for
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, encode

_CHUNK = 100
_AMPLE = Credit(max_in_flight=10**9, samples_per_version=10**9, max_staleness=1, max_bytes=1 << 50)
_MOST_PER_COMMIT = 256
_COMMIT_BYTES = 768 << 10
_LEASE_S = 600.0
_MOST_DEATHS = 3
_SETTLE_S = 60.0


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


async def bulk_enqueue(plan: Plan, client: Redis) -> dict[str, float]:
    """Jobs per second: several calls in flight, and one call after the other."""
    found: dict[str, float] = {}
    for name, most in (("bulk_enqueue_s", IN_FLIGHT), ("bulk_enqueue_one_by_one_s", 1)):
        queue = JobQueue(client, Keys(name))
        jobs = [decode_job(name, number) for number in range(plan.bulk_jobs)]
        chunks = [jobs[begin : begin + _CHUNK] for begin in range(0, len(jobs), _CHUNK)]
        started = time.perf_counter()
        await in_flight((_admitted(queue, chunk) for chunk in chunks), most)
        found[name] = len(jobs) / (time.perf_counter() - started)
    say(f"bulk enqueue: {found['bulk_enqueue_s']:.0f} jobs/s ({found['bulk_enqueue_one_by_one_s']:.0f} one by one)")
    return {**found, "bulk_job_bytes": len(encode(decode_job("bulk", plan.bulk_jobs)))}


async def commits(plan: Plan, client: Redis) -> dict[str, Any]:
    """Sequences per second, by KB of an encoded result."""
    rates, per_call, sizes = {}, {}, {}
    for size in plan.commit_kb:
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
            if seconds >= plan.commit_s:
                break
        rates[str(size)], per_call[str(size)] = committed / seconds, most
        say(f"commit of {size} KB: {rates[str(size)]:.0f} sequences/s, {most} a call")
    return {"commit_s": rates, "commit_per_call": per_call, "commit_bytes": sizes}


async def claims(plan: Plan, client: Redis) -> dict[str, Any]:
    """Microseconds of one claim of one job, by the number of jobs in the queue."""
    queues = {depth: JobQueue(client, Keys(f"depth-{depth}")) for depth in plan.depths}
    for depth, queue in queues.items():
        started = time.perf_counter()
        await in_flight(_no_op_calls(queue, depth))
        say(f"queue of {depth} jobs: filled in {time.perf_counter() - started:.1f} s")
    await _settled(client)
    taken: dict[int, list[float]] = {depth: [] for depth in queues}
    for _ in range(plan.claims):
        for depth, queue in queues.items():
            started = time.perf_counter()
            got = await queue.claim(1, _LEASE_S, _MOST_DEATHS)
            taken[depth].append(1e6 * (time.perf_counter() - started))
            if await queue.release(got.claims) != 1:
                raise BrokerError("a claimed job of the bench could not be handed back")
    found = {str(depth): median(each) for depth, each in taken.items()}
    say("claim: " + ", ".join(f"{taken_us:.0f} us with {depth} jobs queued" for depth, taken_us in found.items()))
    return {"claim_us": found}


async def _admitted(queue: JobQueue, jobs: Sequence[DecodeJob]) -> None:
    _check(await queue.enqueue(jobs, _AMPLE))


async def _called(queue: JobQueue, calls: Sequence[Call]) -> None:
    _check(await queue.enqueue_calls(calls))


def _check(outcomes: Sequence[str]) -> None:
    if set(outcomes) != {"enqueued"}:
        raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")


def _no_op_calls(queue: JobQueue, count: int) -> Iterator[Awaitable[None]]:
    run = queue.keys.run
    for begin in range(0, count, _CHUNK):
        numbers = range(begin, min(begin + _CHUNK, count))
        yield _called(queue, [Call(job_id=tagged(run, str(number)), function="noop") for number in numbers])


async def _claimed(queue: JobQueue, count: int) -> AsyncIterator[list[Claim]]:
    """Lists of `count` fresh claims, without end."""
    number = 0
    while True:
        await _admitted(queue, [decode_job(queue.keys.run, number + i) for i in range(count)])
        number += count
        found: list[Claim] = []
        while len(found) < count:
            found += (await queue.claim(count - len(found), _LEASE_S, _MOST_DEATHS)).claims
        yield found


async def _settled(client: Redis) -> None:
    """A broker that rewrites its append-only file is slower than usual: wait for the end of it."""
    until = time.monotonic() + _SETTLE_S
    while (await client.info("persistence"))["aof_rewrite_in_progress"]:
        if time.monotonic() > until:
            raise DeadlineExceeded(f"the broker still rewrote its append-only file after {_SETTLE_S:.0f} s")
        await asyncio.sleep(0.1)
