"""The whole benchmark on three brokers of the same program, and the fields of its JSON object.

- Idle latency, from just before the enqueue call to the job's first line: one sleeping worker process gets one job at a
  time, at random moments.
- Throughput of the queue's calls for one client, with AOF everysec. Bulk enqueue: 100 decode jobs a call, built before
  the clock starts and encoded while it runs. Commit: results of real claims, several per call as the committer does,
  each call below 1 MB. Claim: one job at a time from a short and a long queue in turn; it is handed back off the clock.
- The cost of two SIGKILLs, under a supervisor that restarts dead workers: both hit the worker with the most jobs, half
  a job's time after it took them. The second hits the jobs that the first one freed, so they are all suspects by then.
  `start_s`: the longest time from the start of a worker process to its first heartbeat. The aim, `limit_s`: twice the
  time without kills, plus one worker start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from sluice.bench.broker import Broker, chunks, decode_job, enqueue, enqueue_calls, in_flight, own_broker, run_config
from sluice.bench.harness import beside, by_count, percentile, say, until
from sluice.bench.processes import START_S, Parent, child_command
from sluice.bench.queue.race import MAX_JOBS, SAQ_MISSING, SYSTEMS, Ours, Plan, Race, saq_is_installed
from sluice.pipeline.broker.connection import ping
from sluice.pipeline.config.types import UpConfig
from sluice.pipeline.errors import BrokerError, DeadlineExceeded, SluiceError
from sluice.pipeline.queue import ArqWorker, Call, Claim, Finished, JobQueue
from sluice.pipeline.run.role import default_name, role_process
from sluice.pipeline.run.stack import Deaths
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_IDLE_GAP_S, _IDLE_WARM = (0.005, 0.045), 5
_MOST_PER_COMMIT = 256
_COMMIT_BYTES = 768 << 10
_LEASE_S = 600.0
_MOST_DEATHS = 3
_SETTLE_S = 60.0
_PROMPT = 64  # tokens of a result's prompt
_KILLS = 2
_NUMBERS = itertools.count()  # of claims
_MAX_JOBS = 64  # one worker may hold all jobs of a round
_LOOK_S, _DEADLINE_S = 0.01, 180.0
_BACKOFF = UpConfig(restart_backoff_s=0.1)


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`*_jobs_s`: median of the rounds, by number of worker processes. `claims_per_job`: claimed jobs over all jobs; a
    job claimed by two workers counts twice. `claim_calls_per_job`: claim calls that returned jobs, over all jobs.
    `ours_vs_*`: median of the rounds' ratios at 2 workers. `ours_worker_us`, `ours_broker_us`: CPU time per job.
    `spread`: slowest and fastest round. `aof`: each broker's AOF setting. `deaths`: by number of workers, seconds for
    `deaths_jobs` jobs of `deaths_job_s` seconds, without kills (`quiet_s`) and with `deaths_kills` kills (`killed_s`).
    """
    if not saq_is_installed():
        say(SAQ_MISSING)
    async with (
        own_broker(home / "durable") as durable,
        own_broker(home / "plain", durable=False) as plain,
        own_broker(home / "calls") as broker,
    ):
        race = Race(plan, durable, plain, home)
        for workers in sorted(set(plan.workers)):
            await race.run(workers)
        facts = ping(run_config("bench", durable.url).broker)
        name = str(facts.get("server_name", "redis"))
        return {
            **race.outcome.fields(),
            **await _idle(plan.idle_jobs, durable, home),
            **await bulk_enqueue(broker, plan.bulk_jobs),
            **await commits(broker, plan.commit_kb, plan.commit_s),
            **await claims(broker, plan.depths, plan.claims),
            **await deaths(broker, home, plan.death_workers, plan.death_jobs, plan.death_job_s),
            "broker": f"{name} {facts.get(f'{name}_version', facts.get('redis_version'))}",
            "aof": {name: "everysec" if name == "ours" else "off" for name in SYSTEMS} | {"calls": "everysec"},
            "ours": {"max_jobs": MAX_JOBS},
        }


async def _idle(jobs: int, broker: Broker, home: Path) -> dict[str, float]:
    """Milliseconds."""
    gaps = random.Random(0)
    async with Ours(broker, "idle").started("idle", 1, home) as ours:
        ours.fleet.resume()
        for number in range(_IDLE_WARM + jobs):
            await asyncio.sleep(gaps.uniform(*_IDLE_GAP_S))
            await ours.queue.enqueue_calls([Call(job_id=f"idle:{number}", function="mark", args=(time.time(),))])
            ours.filled += 1
        await until(ours.is_empty, "all jobs to end", START_S, every_s=_LOOK_S, check=ours.fleet.check)
        (totals,) = await ours.totals()
    waits_ms = [1000 * wait_s for wait_s in totals.waits_s[_IDLE_WARM:]]
    if len(waits_ms) != jobs:
        raise SluiceError(f"{len(waits_ms)} of {jobs} idle jobs were started")
    found = {"idle_p50_ms": percentile(waits_ms, 0.5), "idle_p99_ms": percentile(waits_ms, 0.99)}
    say(f"idle: enqueue to start p50 {found['idle_p50_ms']:.2f} ms, p99 {found['idle_p99_ms']:.2f} ms")
    return found


def result_of(job_id: str, size: int) -> SequenceResult:
    """A job's only sequence, as a worker makes it; about `size` bytes encoded."""
    return replace(_result_template(size), seq_id=f"{job_id}:0", group_id=job_id)


@cache
def _result_template(size: int) -> SequenceResult:
    none, thousand = (len(encode(_result_with(count))) for count in (0, 1000))
    return _result_with(max(0, round((size - none) * 1000 / (thousand - none))))


def _result_with(count: int) -> SequenceResult:
    """`count` tokens, each with a logprob and a word."""
    text, group_id = "word " * count, "commit:" + "0" * 24
    return SequenceResult(
        seq_id=f"{group_id}:0", group_id=group_id, group_size=1, index=0, worker="worker-0", backend="hf",
        prompt_token_ids=TokenArray(range(_PROMPT)), token_ids=TokenArray(range(count)),
        logprobs=FloatArray([-0.5] * count), versions=Runs.of([1] * count), text=text, raw_text=text,
        finish_reason="stop", sampling=SamplingParams(), task="exact_answer",
    )  # fmt: skip


async def bulk_enqueue(broker: Broker, count: int) -> dict[str, float]:
    """Jobs per second: four calls in flight, and one call after the other."""
    found: dict[str, float] = {}
    for name, most in {"bulk_enqueue_s": 4, "bulk_enqueue_one_by_one_s": 1}.items():
        queue = broker.queue(name)
        ready = list(chunks([decode_job(name, number) for number in range(count)]))
        started = time.perf_counter()
        await in_flight((enqueue(queue, chunk) for chunk in ready), most)
        found[name] = count / (time.perf_counter() - started)
    say(f"bulk enqueue: {found['bulk_enqueue_s']:.0f} jobs/s ({found['bulk_enqueue_one_by_one_s']:.0f} one by one)")
    return {**found, "bulk_job_bytes": len(encode(decode_job("bulk", count)))}


async def commits(broker: Broker, kilobytes: Sequence[int], at_least_s: float) -> dict[str, Any]:
    """Sequences per second, by KB of an encoded result."""
    found: dict[str, Any] = {"commit_s": {}, "commit_per_call": {}, "commit_bytes": {}}
    for size in kilobytes:
        most = max(1, min(_MOST_PER_COMMIT, _COMMIT_BYTES // (size << 10)))
        queue, committed, seconds = broker.queue(f"commit-{size}"), 0, 0.0
        while seconds < at_least_s:
            ended = [Finished(claim, result_of(claim.job_id, size << 10)) for claim in await _claimed(queue, most)]
            started = time.perf_counter()
            outcomes = await queue.commit(ended)
            seconds += time.perf_counter() - started
            if set(outcomes) != {"ok"}:
                raise BrokerError(f"commits of the bench were refused: {sorted(set(outcomes))}")
            await broker.client.unlink(queue.keys.result_stream("", 1))
            committed += len(ended)
            found["commit_bytes"][str(size)] = len(encode(ended[0].result))
        found["commit_s"][str(size)], found["commit_per_call"][str(size)] = committed / seconds, most
        say(f"commit of {size} KB: {committed / seconds:.0f} sequences/s, {most} a call")
    return found


async def _claimed(queue: JobQueue, count: int) -> list[Claim]:
    """Claims of `count` new jobs."""
    first = next(_NUMBERS) * _MOST_PER_COMMIT
    await enqueue(queue, [decode_job(queue.keys.run, first + i) for i in range(count)])
    found: list[Claim] = []
    while len(found) < count:
        found += (await queue.claim(count - len(found), _LEASE_S, _MOST_DEATHS)).claims
    return found


async def claims(broker: Broker, depths: Sequence[int], count: int) -> dict[str, Any]:
    """Microseconds to claim one job, by the number of jobs in the queue."""
    taken: dict[int, list[float]] = {depth: [] for depth in depths}
    queues = {depth: broker.queue(f"depth-{depth}") for depth in depths}
    for depth, queue in queues.items():
        started = time.perf_counter()
        await enqueue_calls(queue, "noop", range(depth))
        say(f"queue of {depth} jobs: filled in {time.perf_counter() - started:.1f} s")

    async def settled() -> bool:
        """A broker that rewrites its append-only file is slower than usual."""
        return not (await broker.client.info("persistence"))["aof_rewrite_in_progress"]

    await until(settled, "the broker to rewrite its append-only file", _SETTLE_S)
    for _ in range(count):
        for depth, queue in queues.items():
            started = time.perf_counter()
            got = await queue.claim(1, _LEASE_S, _MOST_DEATHS)
            taken[depth].append(1e6 * (time.perf_counter() - started))
            if await queue.release(got.claims) != 1:
                raise BrokerError("a claimed job of the bench could not be handed back")
    found = by_count(taken, median)
    say("claim: " + ", ".join(f"{taken_us:.0f} us with {depth} jobs queued" for depth, taken_us in found.items()))
    return {"claim_us": found}


async def last(_ctx: Any, seconds: float) -> None:
    await asyncio.sleep(seconds)


async def serve_mortal(_: Parent, url: str, run: str) -> None:
    """A worker to be killed; it runs until SIGTERM. Its heartbeat names the owner of its leases, like any worker's."""
    config = run_config(run, url)
    async with role_process(config, "worker", default_name("worker")) as role:
        worker = ArqWorker(
            [last], client=role.client, keys=role.keys, config=config, name=role.name, stop=role.stop,
            max_jobs=_MAX_JOBS, handle_signals=False,
        )  # fmt: skip
        role.status.fact(owner=worker.leases.queue.owner)
        await role.status.beat()
        await worker.main()
        await worker.close()


async def deaths(broker: Broker, home: Path, by_workers: Sequence[int], jobs: int, job_s: float) -> dict[str, Any]:
    """Seconds, by workers."""
    found: dict[str, dict[str, float]] = {}
    for workers in by_workers:
        quiet, killed = (_Round(broker, home, workers, kills) for kills in (0, _KILLS))
        quiet_s, killed_s = await quiet.run(jobs, job_s), await killed.run(jobs, job_s)
        start_s = max(quiet.start_s, killed.start_s)
        limit_s = 2 * quiet_s + start_s
        found[str(workers)] = {"quiet_s": quiet_s, "killed_s": killed_s, "start_s": start_s, "limit_s": limit_s}
        say(
            f"{jobs} jobs of {job_s:g} s, {workers} workers: {quiet_s:.2f} s; with {_KILLS} "
            f"kills {killed_s:.2f} s (aim {limit_s:.2f} s, a worker's start {start_s:.2f} s)"
        )
    return {"deaths": found, "deaths_jobs": jobs, "deaths_job_s": job_s, "deaths_kills": _KILLS}


class _Round:
    """Supervised workers in a separate run."""

    def __init__(self, broker: Broker, home: Path, workers: int, kills: int) -> None:
        self._config = run_config(f"deaths-{workers}-{kills}", broker.url)
        self._broker, self._workers, self._kills = broker, workers, kills
        self._queue = broker.queue(self._config.run)
        env = {**os.environ, "REDIS_URL": broker.url}
        settle = Deaths(broker.client, self._config).settle
        self._supervisor = Supervisor(_BACKOFF, home / self._config.run, env, settle)
        self.start_s, self._asked = 0.0, 0  # jobs so far

    async def run(self, jobs: int, job_s: float) -> float:
        """Seconds from the first enqueue to the last job's end."""
        async with self._started():
            deadline = time.monotonic() + _DEADLINE_S
            while time.monotonic() < deadline:
                started = time.perf_counter()
                await enqueue_calls(self._queue, "last", range(self._asked, self._asked + jobs), job_s)
                self._asked += jobs
                if all([await self._kill_the_busiest(job_s / 2) for _ in range(self._kills)]):
                    await until(self._is_over, f"{jobs} jobs to end", _DEADLINE_S, every_s=_LOOK_S)
                    return time.perf_counter() - started
                say("the jobs had ended before the kill, once more")
        raise DeadlineExceeded(f"jobs of {job_s:g} s ended before each kill for {_DEADLINE_S:.0f} s")

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncGenerator[None]:
        command = child_command(serve_mortal, [self._config.broker.url, self._config.run])
        for number in range(self._workers):
            self._supervisor.add(f"worker-{number}", command)
        began = time.perf_counter()

        async def up() -> bool:
            return len((await self._broker.snapshot(self._config.run)).alive("worker")) == self._workers

        try:
            async with beside(self._supervisor.run()):
                await until(up, f"{self._workers} workers to start", _DEADLINE_S, every_s=_LOOK_S)
                self.start_s = time.perf_counter() - began
                yield
        finally:
            await self._supervisor.stop()

    async def _holders(self) -> Counter[str]:
        """How many jobs each worker holds."""
        client, keys = self._broker.client, self._queue.keys
        pipe = client.pipeline(transaction=False)
        for job_id in await client.zrange(keys.leases, 0, -1):
            pipe.hget(keys.job_state.encode() + job_id, "worker")
        return Counter(name.decode() for name in await pipe.execute() if name)

    async def _is_over(self) -> bool:
        return int(await self._broker.client.hget(self._queue.keys.counts, "called") or 0) >= self._asked

    async def _kill_the_busiest(self, after_s: float) -> bool:
        """From outside, unannounced. False: all jobs had ended, as may be where this process was late."""

        async def begun() -> bool:
            return bool(await self._holders()) or await self._is_over()

        busiest: list[tuple[str, int]] = []
        while not busiest:
            await until(begun, "a worker that holds jobs", _DEADLINE_S, every_s=_LOOK_S)
            await asyncio.sleep(after_s)
            busiest = (await self._holders()).most_common(1)
            if not busiest and await self._is_over():
                return False
        [(name, _)] = busiest
        if pid := self._supervisor.children[name].pid:
            os.kill(pid, signal.SIGKILL)

        async def gone() -> bool:
            return name not in await self._holders()

        await until(gone, f"the leases of {name} to end", _DEADLINE_S, every_s=_LOOK_S)
        return True
