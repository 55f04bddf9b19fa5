"""A private broker, and the calls that fill and watch it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sluice.bench.harness import until
from sluice.bench.processes import START_S, Fleet
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import Call, Credit, JobQueue, job_id_for
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams

T = TypeVar("T")

AMPLE = Credit(max_in_flight=10**9, samples_per_version=10**9, max_staleness=1, max_bytes=1 << 50)
CHUNK = 100  # jobs a call
IN_FLIGHT = 4
PAUSED_S = 120.0  # a process that was stopped must not consider its connections dead


def run_config(run: str, url: str) -> Config:
    return Config(run=run, broker=BrokerConfig(url=url, socket_timeout_s=PAUSED_S))


@dataclass(frozen=True)
class Traffic:
    """What clients and a broker exchanged."""

    commands: float = 0
    bytes_in: float = 0  # that the broker received
    bytes_out: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return self._each(operator.add, other)

    def __sub__(self, other: Traffic) -> Traffic:
        return self._each(operator.sub, other)

    def per(self, count: int) -> dict[str, float]:
        """Of one among so many."""
        return {name: total / count for name, total in vars(self).items()}

    def _each(self, combine: Callable[[float, float], float], other: Traffic) -> Traffic:
        return Traffic(*map(combine, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Broker:
    """A client of it, and its address."""

    client: Any
    url: str

    def queue(self, run: str, worker: str = "") -> JobQueue:
        return JobQueue(self.client, Keys(run), worker=worker)

    async def snapshot(self, run: str) -> Snapshot:
        return await snapshot(self.client, Keys(run))

    async def cpu_s(self) -> float:
        """CPU seconds it has used so far (user and system)."""
        facts = await self.client.info("cpu")
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])

    async def used_bytes(self) -> int:
        """Memory it has allocated."""
        return int((await self.client.info("memory"))["used_memory"])

    async def commands(self) -> int:
        """How many it has processed so far, of everybody."""
        return int((await self.client.info("stats"))["total_commands_processed"])

    def url_as(self, name: str) -> str:
        """Its address for connections that bear this name."""
        return f"{self.url}?client_name={name}"

    async def traffic(self) -> dict[str, Traffic]:
        """So far, by the name of the connections that are open now; "" has none.

        Empty on a broker that doesn't count by connection: Redis (looked at: 6.2 and 7.0), Valkey before 8.1.
        """
        found: dict[str, Traffic] = {}
        rows = await self.client.client_list()
        for row in rows if "tot-cmds" in rows[0] else ():
            name = row["name"]
            more = Traffic(*(int(row[key]) for key in ("tot-cmds", "tot-net-in", "tot-net-out")))
            found[name] = found.get(name, Traffic()) + more
        return found

    async def serving(self, run: str) -> list[dict[str, Any]]:
        """The facts of each worker with a loaded engine."""
        return [row.facts for row in (await self.snapshot(run)).alive("worker") if "running" in row.facts]

    async def until_serving(self, run: str, fleet: Fleet, count: int = 1) -> None:
        """Wait until that many workers have their engines. Raises SluiceError if a process of the fleet has ended."""

        async def serve() -> bool:
            return len(await self.serving(run)) >= count

        await until(serve, f"{count} workers with their engines", START_S, check=fleet.check)


@contextlib.asynccontextmanager
async def own_broker(directory: Path, *, durable: bool = True) -> AsyncGenerator[Broker]:
    """With AOF everysec unless not `durable`; ended after the block."""
    with embedded_broker(BrokerConfig(embedded_dir=str(directory))) as url:
        client: Any = connect(run_config("bench", url).broker)
        try:
            if not durable:
                await client.config_set("appendonly", "no")
            yield Broker(client, url)
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


def chunks(jobs: Iterable[T]) -> Iterator[list[T]]:
    waiting = iter(jobs)
    while chunk := list(itertools.islice(waiting, CHUNK)):
        yield chunk


def new_job(run: str, name: str, sampling: SamplingParams, n: int = 1, **more: Any) -> DecodeJob:
    """A job for the task `exact_answer`, with the id a producer would give it."""
    job_id = job_id_for(run, name, 0, sampling, n)
    return DecodeJob(run=run, job_id=job_id, n=n, sampling=sampling, task="exact_answer", **more)


def decode_job(run: str, number: int) -> DecodeJob:
    """As producers make them: a system prompt, a question, a truth."""
    system = "You are a careful mathematician. Explain step by step, then answer."
    question = f"Problem {number}: a shop sells {number} apples and buys {7 * number % 100} more. How many are there?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    sampling = SamplingParams(temperature=0.8, max_new_tokens=512, stop=("</answer>",))
    facts: dict[str, Any] = {"truth": {"answer": number + 7 * number % 100}, "metadata": {"row": number}}
    return new_job(run, str(number), sampling, messages=messages, **facts)


async def enqueue(queue: JobQueue, jobs: Iterable[DecodeJob], credit: Credit = AMPLE) -> None:
    """Enqueue, a chunk per call. Raises BrokerError unless all are admitted."""
    for chunk in chunks(jobs):
        _check_admitted(await queue.enqueue(chunk, credit))


async def enqueue_calls(queue: JobQueue, function: str, numbers: Iterable[int], *args: Any) -> None:
    """Enqueue a call for each number, a few chunks at a time. Raises BrokerError unless all are admitted."""
    names = (tagged(queue.keys.run, str(number)) for number in numbers)

    async def put(calls: Sequence[Call]) -> None:
        _check_admitted(await queue.enqueue_calls(calls))

    await in_flight(map(put, chunks(Call(job_id=name, function=function, args=args) for name in names)))


def _check_admitted(outcomes: Sequence[str]) -> None:
    if set(outcomes) != {"enqueued"}:
        raise BrokerError(f"the bench's jobs were refused: {sorted(set(outcomes))}")
