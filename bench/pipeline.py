"""What the pipeline costs over the engine alone: queue, workers, result stream and a null sink beside bare engines.

    jobs ─┬▶ BareEngines     W processes, each the engine on its share of the jobs; no Redis    ─┬▶ fields
          └▶ QueuedEngines   broker ─▶ W `sluice worker` ─▶ result stream ─▶ Sink               ─┘

- The side not being measured costs nothing: bare engines block on stdin, workers are stopped (SIGSTOP).
- The bare engines' clock excludes rendering the prompts; the queue's includes it.
- Afterwards, the latency of the pipeline is measured under half of its load.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from sluice.bench.broker import Broker, enqueue, new_job, own_broker
from sluice.bench.engines import loaded
from sluice.bench.harness import HOME, BenchPlan, median_of, percentile, play, ratios, say
from sluice.bench.models import demo_model
from sluice.bench.processes import START_S, Fleet, Parent, run_settings
from sluice.pipeline.broker.streams import result_reader
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, SluiceError
from sluice.pipeline.queue import seed_for
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult, decode

RUN = "bench"
SHORTEST, LONGEST = 32, 128  # new tokens; random weights seldom end earlier
_STRIDE = 37  # coprime to the span of lengths, so neighbours differ a lot
_LATENCY_LOAD = 0.5  # share of the saturated rate
_WARM_TOKENS, _WARM_ROUNDS = 32, 5
_BARE_S = 600.0


class Plan(BenchPlan, frozen=True, kw_only=True):
    """Counts are per round; without a model, a tiny one decodes the demo's scenes."""

    sequences: int
    workers: int
    rounds: int
    max_batch: int
    model: Path | None = None

    def __post_init__(self) -> None:
        if self.sequences < self.workers:
            raise ConfigError(f"--sequences {self.sequences} is less than --workers {self.workers}")

    @property
    def directory(self) -> Path:
        return self.model.resolve() if self.model else demo_model(HOME)

    def settings(self) -> list[str]:
        """The same for the bare engines and the workers."""
        return run_settings(RUN, self.directory, "seed=0", f"worker.max_batch={self.max_batch}", "worker.drain_s=1")

    def jobs(self, name: str, count: int, longest: int = LONGEST) -> list[DecodeJob]:
        return jobs(name, count, digits=self.model is None, longest=longest)


@dataclass(frozen=True)
class Sample:
    """One side of one round: wall seconds, CPU seconds of its engines' processes, tokens by sequence id."""

    seconds: float
    cpu_s: float
    tokens: Mapping[str, list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


Round = Mapping[str, Sample]
"""Both sides, `bare` and `queued`, over the same jobs."""


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`bytes_per_token`: bytes the broker received during the pipeline's rounds, by its own count, per token decoded.
    `result_bytes_per_token`: the part of it due to result entries. `latency_*_s`: from the queue's `enqueued_at` to the
    arrival in the sink, decoding included.
    """
    settings = plan.settings()
    async with own_broker(home / "broker") as broker, Fleet("worker", home) as workers, Fleet("bare", home) as bare:
        for worker in range(plan.workers):  # they load at the same time as the queue's
            await bare.start_child(serve_bare, [settings, worker, plan.workers, plan.model is None])
        queued = QueuedEngines(plan.workers, settings, workers, broker)
        await queued.start()
        await bare.started()
        await _warm_up(plan, bare, queued)
        received = result_bytes = 0

        async def one(side: str, number: int) -> Sample:
            nonlocal received, result_bytes
            name = f"round-{number}"
            if side == "bare":
                return await bare_round(bare, name, plan.sequences, LONGEST)
            before = await queued.bytes_received()
            sample, arrivals = await queued.round(plan.jobs(name, plan.sequences))
            received += await queued.bytes_received() - before
            result_bytes += sum(len(arrival.raw) for arrival in arrivals)
            return sample

        def show(sample: Sample) -> str:
            return f"{sample.tok_s:.0f} tok/s ({sample.cpu_s:.1f} s of processor time)"

        rounds = await play(plan.rounds, ("bare", "queued"), one, lambda _, found: check(found), show=show)
        tokens = sum(each["queued"].num_tokens for each in rounds)
        half = _LATENCY_LOAD * median_of(rounds, "queued", lambda sample: len(sample.tokens) / sample.seconds)
        return {
            **summary(rounds),
            "bytes_per_token": received / tokens,
            "result_bytes_per_token": result_bytes / tokens,
            "tokens": rounds[0]["queued"].num_tokens,
            "identical_rounds": sum(each["bare"].tokens == each["queued"].tokens for each in rounds),
            "per_round": [summary([each]) for each in rounds],
            "model": plan.directory.name,
            **await _latency(plan, queued, half),
        }


async def _warm_up(plan: Plan, bare: Fleet, queued: QueuedEngines) -> None:
    """A short round on both sides; the queue's continues until every worker took part."""
    count = 2 * plan.workers * plan.max_batch
    await bare_round(bare, "warm", count, _WARM_TOKENS)
    for attempt in range(_WARM_ROUNDS):
        _, arrivals = await queued.round(plan.jobs(f"warm-{attempt}", count, _WARM_TOKENS))
        if len({arrival.result().worker for arrival in arrivals}) == plan.workers:
            return
    raise SluiceError(f"not every worker took part in {_WARM_ROUNDS} warm-up rounds")


async def _latency(plan: Plan, queued: QueuedEngines, rate: float) -> dict[str, Any]:
    """Under an open load of `rate` jobs per second: total latencies, and their parts that weren't decoding."""
    count = max(1, plan.sequences // 2)
    arrivals = await queued.open_load(plan.jobs("latency", count), rate)
    timings = [(arrival.at, arrival.result().timings) for arrival in arrivals]
    whole = [at - times["enqueued_at"] for at, times in timings]
    around = [at - times["enqueued_at"] - times["decode_s"] for at, times in timings]
    found = {f"latency_p{share}_s": percentile(whole, share / 100) for share in (50, 99)}
    found |= {f"latency_queue_p{share}_s": percentile(around, share / 100) for share in (50, 99)}
    say(f"latency at {rate:.1f} sequences/s: p50 {found['latency_p50_s']:.3f} s, p99 {found['latency_p99_s']:.3f} s")
    return {**found, "latency_sequences_per_s": rate, "latency_sequences": count}


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """`cpu_efficiency`: by CPU time, which is steadier than wall time on a busy machine."""
    return {
        "bare_tok_s": median_of(rounds, "bare", lambda sample: sample.tok_s),
        "pipeline_tok_s": median_of(rounds, "queued", lambda sample: sample.tok_s),
        "efficiency": median(ratios(rounds, "queued", "bare", lambda sample: sample.tok_s)),
        "cpu_efficiency": median(ratios(rounds, "bare", "queued", lambda sample: sample.cpu_s)),
    }


def check(found: Round) -> None:
    """Raise SluiceError unless both sides decoded the same sequences to the same lengths."""
    bare, queued = ({key: len(tokens) for key, tokens in found[side].tokens.items()} for side in ("bare", "queued"))
    if differ := [key for key in bare.keys() | queued.keys() if bare.get(key) != queued.get(key)]:
        counts = f"{bare.get(differ[0])} tokens bare, {queued.get(differ[0])} through the queue"
        first = f"{len(differ)} sequences differ, e.g. {differ[0]} ({counts})"
        raise SluiceError(f"the two sides decoded different tokens: {first}; ratios would be unfair")


def num_new_tokens(index: int) -> int:
    return SHORTEST + index * _STRIDE % (LONGEST - SHORTEST + 1)


def jobs(name: str, count: int, *, digits: bool, longest: int = LONGEST) -> list[DecodeJob]:
    """`count` jobs of the round with this name; every round has the same prompts and lengths.

    Ids contain the round, so no round meets another's tombstones; seeds follow from the ids.
    """
    text = "Problem {0}: a shop sells {0} apples and buys {1} more. How many are there? Explain step by step."
    prompts: list[Any] = [[{"role": "user", "content": text.format(i, 7 * i % 100)}] for i in range(count)]
    if digits:
        from sluice.demo.digits.data import messages_of
        from sluice.demo.digits.scenes import scenes

        prompts = [list(messages_of(scene)) for scene in scenes("train", count, 11)]
    lengths = [min(longest, num_new_tokens(index)) for index in range(count)]
    samplings = [SamplingParams(temperature=1.0, max_new_tokens=length) for length in lengths]
    return [new_job(RUN, f"{name}:{at}", samplings[at], messages=prompts[at]) for at in range(count)]


async def bare_round(bare: Fleet, name: str, count: int, longest: int) -> Sample:
    """Each process decodes its share of the jobs of a round; the clock runs from `go` to the last answer."""
    await bare.ask((name, count, longest), str, _BARE_S)
    started, cpu_s = time.monotonic(), bare.cpu_s()
    answers = await bare.ask("go", dict[str, list[int]], _BARE_S)
    seconds, cpu_s = time.monotonic() - started, bare.cpu_s() - cpu_s
    return Sample(seconds, cpu_s, {key: tokens for answer in answers for key, tokens in answer.items()})


async def serve_bare(parent: Parent, settings: list[str], worker: int, workers: int, digits: bool) -> None:
    """A bare engine's process: it prepares its share of a round, says `ready`, and decodes it on the next line."""
    from sluice.workers.engine.backends import make_backend
    from sluice.workers.engine.contracts import SequenceRequest
    from sluice.workers.job_prompts import JobPrompts

    config = load_config(None, settings, {})
    async with loaded(make_backend(config.model, config.worker)) as backend:
        prompts = JobPrompts(config.model)
        parent.tell("ready")
        async for name, count, longest in parent.requests(tuple[str, int, int]):
            requests: list[SequenceRequest] = []
            for job in jobs(name, count, digits=digits, longest=longest)[worker::workers]:
                prompt, seed = tuple(prompts.text(job, backend.facts).token_ids), seed_for(config.seed, job.job_id, 0)
                requests.append(SequenceRequest(f"{job.job_id}:0", prompt, job.sampling, seed=seed))
            parent.tell("ready")
            await parent.line()
            outputs = await asyncio.gather(*map(backend.decode, requests))
            parent.tell({output.seq_key: output.token_ids for output in outputs})
        await prompts.close()


class Arrival(NamedTuple):
    """One result as it came in; `at` is Unix seconds, `log` its job's, if it ended with it."""

    at: float
    raw: bytes
    log: bytes = b""

    def result(self) -> SequenceResult:
        return decode(SequenceResult, self.raw)


class QueuedEngines:
    """The broker's queue, W real workers, the result stream, the sink."""

    def __init__(self, workers: int, settings: Sequence[str], fleet: Fleet, broker: Broker) -> None:
        self._workers, self._settings, self._fleet, self._broker = workers, settings, fleet, broker
        self._queue, self._sink = broker.queue(RUN), Sink(broker, fleet)

    async def start(self) -> None:
        """Start the workers and wait until each has its engine; they are stopped outside rounds."""
        for _ in range(self._workers):
            await self._fleet.start_role("worker", self._settings, self._broker.url)
        await self._sink.open()
        await self._broker.until_serving(RUN, self._fleet, self._workers)
        self._fleet.pause()

    async def round(self, jobs: Sequence[DecodeJob]) -> tuple[Sample, list[Arrival]]:
        """All jobs at once; the clock runs from before the first enqueue to the arrival of the last result."""
        with self._fleet.running():
            started, cpu_s = time.monotonic(), self._fleet.cpu_s()
            arrivals, _ = await asyncio.gather(self._sink.collect(len(jobs)), enqueue(self._queue, jobs))
            seconds, cpu_s = time.monotonic() - started, self._fleet.cpu_s() - cpu_s
        results = [arrival.result() for arrival in arrivals]
        return Sample(seconds, cpu_s, {result.seq_id: list(result.token_ids) for result in results}), arrivals

    async def open_load(self, jobs: Sequence[DecodeJob], per_second: float) -> list[Arrival]:
        """Jobs arrive at random (exponential gaps), regardless of what is still running."""
        gaps, due = random.Random(0), time.monotonic()
        collected = asyncio.create_task(self._sink.collect(len(jobs)))
        with self._fleet.running():
            try:
                for job in jobs:
                    due += gaps.expovariate(per_second)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    await enqueue(self._queue, [job])
                return await collected
            finally:
                collected.cancel()

    async def bytes_received(self) -> int:
        """Bytes the broker's sockets received since its start: jobs, claims, commits, heartbeats, reads and acks."""
        return int((await self._broker.client.info("stats"))["total_net_input_bytes"])


class Watched(Protocol):
    """Processes whose work is waited for."""

    def check(self) -> None:
        """Raise SluiceError if one has ended."""


class Sink:
    """The only reader of the run's one partition: reads results, acks and deletes them as a consumer does.

    Results are deserialised after the clock has stopped.
    """

    def __init__(self, broker: Broker, watched: Watched, run: str = RUN) -> None:
        self._client, self._watched = broker.client, watched
        self._reader = result_reader(broker.client, Keys(run), 0, "sink")

    async def open(self) -> None:
        await self._reader.open()

    async def collect(self, count: int) -> list[Arrival]:
        """The next `count` results. Raises DeadlineExceeded if none arrives for a while."""
        found: list[Arrival] = []
        last = time.monotonic()
        while len(found) < count:
            if arrivals := await self.take():
                last = time.monotonic()
                found += arrivals
            elif time.monotonic() - last > START_S:
                raise DeadlineExceeded(f"no result for {START_S:.0f} s; {len(found)} of {count} arrived")
        return found

    async def take(self) -> list[Arrival]:
        """What has arrived, or arrives soon; empty after half a second. Raises SluiceError if a process has ended."""
        entries = await self._reader.read(64, 500)
        at = time.time()
        if entries:
            pipe = self._client.pipeline(transaction=False)
            ids = [entry.entry_id for entry in entries]
            pipe.xack(self._reader.stream, self._reader.group, *ids)
            pipe.xdel(self._reader.stream, *ids)
            await pipe.execute()
        self._watched.check()
        return [Arrival(at, entry.fields[b"r"], entry.fields.get(b"l", b"")) for entry in entries]
