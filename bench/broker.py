"""A private broker, and the calls that fill and watch it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice.bench.harness import until
from sluice.bench.processes import START_S, Fleet
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import Call, Credit, JobQueue, job_id_for
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams

AMPLE = Credit(max_in_flight=10**9, samples_per_version=10**9, max_staleness=1, max_bytes=1 << 50)
CHUNK = 100  # jobs a call
IN_FLIGHT = 4
_PAUSED_S = 120.0  # a process that was stopped must not consider its connections dead


def broker_config(url: str) -> BrokerConfig:
    return BrokerConfig(url=url, socket_timeout_s=_PAUSED_S)


@contextlib.asynccontextmanager
async def own_broker(directory: Path, *, durable: bool = True) -> AsyncGenerator[tuple[Any, str]]:
    """A client and the address, with AOF everysec unless not `durable`."""
    with embedded_broker(BrokerConfig(embedded_dir=str(directory))) as url:
        client: Any = connect(broker_config(url))
        try:
            if not durable:
                await client.config_set("appendonly", "no")
            yield client, url
        finally:
            await client.aclose()


async def in_flight(calls: Iterator[Awaitable[Any]], most: int = IN_FLIGHT) -> None:
    """Await all calls, `most` at a time in start order, like a producer that doesn't wait for each answer."""

    async def pull() -> None:
        for call in calls:
            await call

    async with asyncio.TaskGroup() as group:
        for _ in range(most):
            group.create_task(pull())


def chunks(jobs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (jobs[begin : begin + CHUNK] for begin in range(0, len(jobs), CHUNK))


def decode_job(run: str, number: int) -> DecodeJob:
    """As producers make them: a system prompt, a question, a truth."""
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


async def enqueue(queue: JobQueue, jobs: Sequence[DecodeJob], credit: Credit = AMPLE) -> None:
    """Enqueue in one call. Raises BrokerError unless all are admitted."""
    check_admitted(await queue.enqueue(jobs, credit))


async def enqueue_calls(queue: JobQueue, calls: Sequence[Call]) -> None:
    check_admitted(await queue.enqueue_calls(calls))


def check_admitted(outcomes: Sequence[str]) -> None:
    if set(outcomes) != {"enqueued"}:
        raise BrokerError(f"the bench's jobs were refused: {sorted(set(outcomes))}")


async def broker_s(client: Any) -> float:
    """CPU seconds the broker has used so far (user and system)."""
    facts = await client.info("cpu")
    return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


async def used_bytes(client: Any) -> int:
    """Memory the broker has allocated."""
    return int((await client.info("memory"))["used_memory"])


async def serving(client: Any, keys: Keys) -> list[dict[str, Any]]:
    """The facts of each worker with a loaded engine."""
    return [row.facts for row in (await snapshot(client, keys)).alive("worker") if "running" in row.facts]


async def until_serving(client: Any, keys: Keys, fleet: Fleet, count: int = 1) -> None:
    """Wait until that many workers have their engines. Raises SluiceError if a process of the fleet has ended."""

    async def serve() -> bool:
        return len(await serving(client, keys)) >= count

    await until(serve, f"{count} workers with their engines", START_S, check=fleet.check)
