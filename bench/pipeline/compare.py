"""Both sides in one run, round by round, and then the latency of the pipeline under half its load.

- The side that is not measured costs nothing: bare engines block on stdin, workers are paused by SIGSTOP.
- Every other round begins with the other side, so a drift of the machine cancels out.
- Everything runs on a broker and in a directory of its own, which are removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sluice.bench.interruptible import run_interruptible
from sluice.bench.pipeline import stats
from sluice.bench.pipeline.bare import BareEngines
from sluice.bench.pipeline.load import LONGEST, jobs
from sluice.bench.pipeline.plan import HOME, Plan
from sluice.bench.pipeline.sink import Arrival
from sluice.bench.pipeline.stats import Round
from sluice.bench.pipeline.through_queue import QueuedEngines
from sluice.bench.processes import Fleet
from sluice.bench.report import say
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import SluiceError

_LATENCY_LOAD = 0.5  # share of the saturated rate
_WARM_TOKENS = 32
_WARM_ROUNDS = 5


def compare(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `bytes_per_token`: bytes that the broker received during the pipeline's rounds, by its own count, over the
    tokens decoded in them. `result_bytes_per_token`: the share of it that result entries are.
    `latency_*_s`: from the queue's `enqueued_at` to the arrival in the sink, decoding included.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME))
    try:
        with embedded_broker(BrokerConfig(embedded_dir=str(home / "broker"))) as url:
            return run_interruptible(_run(plan, home, url))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _run(plan: Plan, home: Path, url: str) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as scope:
        client = connect(BrokerConfig(url=url))
        scope.push_async_callback(client.aclose)
        workers = await scope.enter_async_context(Fleet("worker", home))
        queued = QueuedEngines(plan, workers, client, url)
        bare = BareEngines(plan, await scope.enter_async_context(Fleet("bare", home)))
        bench = _Bench(plan, bare, queued, workers)
        await bare.start()
        await queued.start()
        await bench.warm_up()
        rounds = [await bench.round(number) for number in range(plan.rounds)]
        rate = _LATENCY_LOAD * stats.median(len(each.pipeline.tokens) / each.pipeline.seconds for each in rounds)
        return {**bench.result(rounds), **await bench.latency(rate)}


class _Bench:
    def __init__(self, plan: Plan, bare: BareEngines, queued: QueuedEngines, workers: Fleet) -> None:
        self._plan, self._bare, self._queued, self._workers = plan, bare, queued, workers
        self._received = 0
        self._result_bytes = 0
        self._same = 0

    async def warm_up(self) -> None:
        """A short round on both sides; on the queue's until every worker took part."""
        count = 2 * self._plan.workers * self._plan.max_batch
        self._workers.pause()
        await self._bare.round("warm", count, _WARM_TOKENS)
        self._workers.resume()
        for attempt in range(_WARM_ROUNDS):
            warm = jobs(f"warm-{attempt}", count, digits=self._plan.digits, longest=_WARM_TOKENS)
            _, arrivals = await self._queued.round(warm)
            if len({arrival.result().worker for arrival in arrivals}) == self._plan.workers:
                return
        raise SluiceError(f"not every worker took part in {_WARM_ROUNDS} warm-up rounds")

    async def round(self, number: int) -> Round:
        """Both sides, in turns first."""
        name = f"round-{number}"
        if number % 2:
            queued = await self._through_queue(name)
            bare = await self._bare_round(name)
        else:
            bare = await self._bare_round(name)
            queued = await self._through_queue(name)
        done = Round(bare, queued)
        done.check()
        self._same += done.bare.digest == done.pipeline.digest
        say(
            f"round {number + 1}/{self._plan.rounds}: bare {bare.tok_s:.0f} tok/s, through the queue "
            f"{queued.tok_s:.0f} tok/s, efficiency {done.efficiency:.3f} "
            f"({bare.num_tokens} tokens each; by processor time {done.cpu_efficiency:.3f})"
        )
        return done

    async def latency(self, rate: float) -> dict[str, Any]:
        """Under an open load of `rate` jobs a second."""
        count = max(1, self._plan.sequences // 2)
        arrivals = await self._queued.open_load(jobs("latency", count, digits=self._plan.digits), rate)
        found = _latencies(arrivals)
        say(
            f"latency at {rate:.1f} sequences/s: p50 {found['latency_p50_s']:.3f} s, p99 {found['latency_p99_s']:.3f} s"
        )
        return {**found, "latency_sequences_per_s": rate, "latency_sequences": count}

    def result(self, rounds: list[Round]) -> dict[str, Any]:
        """Everything but the latency."""
        tokens = sum(each.pipeline.num_tokens for each in rounds)
        return {
            **stats.summary(rounds),
            "bytes_per_token": self._received / tokens,
            "result_bytes_per_token": self._result_bytes / tokens,
            "sequences": self._plan.sequences,
            "workers": self._plan.workers,
            "max_batch": self._plan.max_batch,
            "rounds": self._plan.rounds,
            "tokens": rounds[0].pipeline.num_tokens,
            "identical_rounds": self._same,
            "per_round": [
                {
                    "bare_tok_s": each.bare.tok_s,
                    "pipeline_tok_s": each.pipeline.tok_s,
                    "efficiency": each.efficiency,
                    "cpu_efficiency": each.cpu_efficiency,
                }
                for each in rounds
            ],
            "model": self._plan.model.name,
        }

    async def _bare_round(self, name: str) -> stats.Sample:
        self._workers.pause()
        try:
            return await self._bare.round(name, self._plan.sequences, LONGEST)
        finally:
            self._workers.resume()

    async def _through_queue(self, name: str) -> stats.Sample:
        load = jobs(name, self._plan.sequences, digits=self._plan.digits)
        before = await self._queued.bytes_received()
        sample, arrivals = await self._queued.round(load)
        self._received += await self._queued.bytes_received() - before
        self._result_bytes += sum(len(arrival.raw) for arrival in arrivals)
        return sample


def _latencies(arrivals: list[Arrival]) -> dict[str, float]:
    """Whole latencies, and what of them was not decoding."""
    timings = [(arrival.at, arrival.result().timings) for arrival in arrivals]
    whole = [at - times["enqueued_at"] for at, times in timings]
    around = [at - times["enqueued_at"] - times["decode_s"] for at, times in timings]
    return {
        "latency_p50_s": stats.percentile(whole, 0.5),
        "latency_p99_s": stats.percentile(whole, 0.99),
        "latency_queue_p50_s": stats.percentile(around, 0.5),
        "latency_queue_p99_s": stats.percentile(around, 0.99),
    }
