"""How fairly workers of many runs divide their tokens, and what that costs: real brokers, workers and engines.

    20 runs, half of them always with jobs, half with fewer than their share ──▶ workers ──▶ tokens of each run

- What a run should get is weighted max-min fairness (fairness.py), of the tokens that all got.
- `rate_share`: tokens/s of the workers with all runs, over those of as many usual workers of one run, in turns.
- A random model of the demo's size decodes; the runs have no adapters, whose cost docs/policy.md has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sluice.bench.broker import AMPLE, Broker, chunks, own_broker
from sluice.bench.fairness import entitled, jain
from sluice.bench.harness import HOME, BenchPlan, aim, beside, play, ratios, say, spread, until
from sluice.bench.models import demo_model
from sluice.bench.processes import START_S, Fleet
from sluice.pipeline.config.load import resolved_yaml
from sluice.pipeline.config.types import (
    BrokerConfig,
    Config,
    FleetRun,
    LoraConfig,
    MetricsConfig,
    ModelConfig,
    TrainerConfig,
    WorkerConfig,
)
from sluice.pipeline.queue import job_id_for
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams

_WEIGHTS = (1.0, 2.0, 4.0)
_LENGTHS = (8, 16, 32, 64)  # new tokens of a run's sequences
_GROUPS = (1, 2, 4)  # sequences of its jobs
_LOOK_S, _AHEAD = 0.25, 8192  # tokens in the queue of a run that always has jobs, for each worker
_LEAST_TOKENS, _LONGEST = 1000, 4  # of each run in the mean: jobs are up to 256; and times `seconds` for them
_PROMPT = "What is 2 + 2?"
_MIXED = 512  # jobs, before they come again
_AIM, _COST = 0.95, 0.9


class Plan(BenchPlan, frozen=True, kw_only=True):
    """`seconds` of each round are measured, or more on a slow machine, after as many that warm up."""

    runs: int = 20
    workers: int = 1
    seconds: float = 20.0
    rounds: int = 3
    max_batch: int = 32

    QUICK = {"runs": 6, "seconds": 4.0, "rounds": 1, "max_batch": 16}
    BOUNDS = {"runs": (2, 256)}


class Shape(NamedTuple):
    """Of a job."""

    length: int  # tokens of each sequence
    group: int  # sequences


class Demand:
    """One run's: jobs of these shapes in turns; `share` of its fair share, or more than it can get (inf)."""

    def __init__(self, name: str, weight: float, share: float, shapes: Sequence[Shape]) -> None:
        self.name, self.keys, self.weight, self.share, self._shapes = name, Keys(name), weight, share, shapes
        self._made, self.asked = 0, 0.0  # tokens

    async def add(self, broker: Broker, tokens: float) -> None:
        """Jobs, until it has asked for about so many tokens."""
        jobs: list[DecodeJob] = []
        while True:
            shape = self._shapes[self._made % len(self._shapes)]
            if self.asked + shape.length * shape.group > tokens:
                break
            self._made += 1
            self.asked += shape.length * shape.group
            sampling = SamplingParams(max_new_tokens=shape.length)
            name = job_id_for(self.name, str(self._made), 0, sampling, shape.group)
            messages = [{"role": "user", "content": _PROMPT}]
            jobs.append(DecodeJob(run=self.name, job_id=name, n=shape.group, messages=messages, sampling=sampling))
        for chunk in chunks(jobs):
            await broker.queue(self.name).enqueue(chunk, AMPLE)


def _mixed(draw: random.Random, shapes: Sequence[Shape], demands: Sequence[Demand]) -> list[Shape]:
    """Jobs of one run that are the same work, token by token, as those of all runs that get their fair shares."""
    weights = {demand.name: demand.weight for demand in demands}
    fair = sum(weights.values())
    asked = {demand.name: demand.share * demand.weight for demand in demands}
    tokens = entitled(asked, weights, fair)
    often = [tokens[demand.name] / (shape.length * shape.group) for demand, shape in zip(demands, shapes, strict=True)]
    return draw.choices(shapes, often, k=_MIXED)


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`jain`: of the shares that the runs got, of each round; `lowest`, `highest`: of what a run should have got."""
    model = await asyncio.to_thread(demo_model, HOME)
    found: list[dict[str, Any]] = []

    async def one(side: str, number: int) -> float:
        place = home / f"{side}-{number}"
        place.mkdir()
        async with own_broker(place) as broker:
            draw = random.Random(number)
            shapes = [Shape(draw.choice(_LENGTHS), draw.choice(_GROUPS)) for _ in range(plan.runs)]
            demands = [
                Demand(f"r{at:03}", draw.choice(_WEIGHTS), draw.uniform(0.2, 0.8) if at % 2 else math.inf, [shape])
                for at, shape in enumerate(shapes)
            ]
            if side == "one":
                demands = [Demand("one", 1.0, math.inf, _mixed(draw, shapes, demands))]
            async with _workers(plan, place, model, broker, demands) as fleet:
                got, asked, seconds = await _flow(plan, broker, demands, fleet)
        if side == "all":
            found.append(_shares(demands, got, asked))
        return sum(got.values()) / seconds

    rates = await play(plan.rounds, ("all", "one"), one, show=lambda rate: f"{rate:.0f} tokens/s")
    index = min(each["jain"] for each in found)
    share = median(ratios(rates, "all", "one", float))
    return {
        "jain": [each["jain"] for each in found],
        "jain_aim": aim(">=", _AIM, index),
        "lowest_share": min(each["lowest"] for each in found),
        "highest_share": max(each["highest"] for each in found),
        "tokens_per_s": [each["all"] for each in rates],
        "rate_share": share,
        "rate_share_spread": spread(ratios(rates, "all", "one", float)),
        "rate_share_aim": aim(">=", _COST, share),
    }


def _shares(demands: list[Demand], got: Mapping[str, float], asked: Mapping[str, float]) -> dict[str, Any]:
    wanted = entitled(asked, {each.name: each.weight for each in demands}, sum(got.values()))
    shares = [got[each.name] / wanted[each.name] for each in demands if wanted[each.name] > 0]
    index = jain(shares)
    say(f"Jain's index {index:.4f}; of what a run should get: {min(shares):.3f} to {max(shares):.3f}")
    return {"jain": index, "lowest": min(shares), "highest": max(shares)}


@contextlib.asynccontextmanager
async def _workers(plan: Plan, home: Path, model: Path, broker: Broker, demands: list[Demand]) -> AsyncGenerator[Fleet]:
    usual: dict[str, Any] = {
        "model": ModelConfig(path=str(model), device="cpu"),
        "broker": BrokerConfig(url=broker.url),
        "run_dir": str(home / "runs"),
        "metrics": MetricsConfig(enabled=False),
    }
    entries: list[FleetRun] = []
    for each in demands:
        file = home / f"{each.name}.yaml"
        run = Config(run=each.name, trainer=TrainerConfig(lora=LoraConfig(rank=8)), **usual)
        file.write_text(resolved_yaml(run, secrets=True))
        entries.append(FleetRun(config=str(file), weight=each.weight))
    worker = WorkerConfig(lora="requests", runs=tuple(entries), max_batch=plan.max_batch)
    if len(demands) == 1:  # a usual worker, of this run alone
        worker = WorkerConfig(max_batch=plan.max_batch)
    settings = home / "workers.yaml"
    name = demands[0].name if len(demands) == 1 else "fleet"
    settings.write_text(resolved_yaml(Config(run=name, worker=worker, **usual), secrets=True))
    async with Fleet("worker", home) as fleet:
        for _ in range(plan.workers):
            await fleet.start(sluice_command("worker", "-c", str(settings)), {"REDIS_URL": broker.url})
        yield fleet


async def _flow(
    plan: Plan, broker: Broker, demands: list[Demand], fleet: Fleet
) -> tuple[dict[str, float], dict[str, float], float]:
    """Tokens of each run and what it asked for, over the seconds that were measured."""
    for each in demands:
        await broker.until_serving(each.name, fleet, plan.workers)
    rate = 0.0  # of all, tokens/s, as measured while warming up
    feeding = asyncio.Event()

    async def feed() -> None:
        total = sum(each.weight for each in demands)
        began = time.monotonic()
        while True:
            for each in demands:
                if math.isinf(each.share):
                    await each.add(broker, await _tokens(broker, each) + _AHEAD * plan.workers)
                elif feeding.is_set():
                    await each.add(broker, each.share * rate * each.weight / total * (time.monotonic() - began))
                else:
                    began = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async with beside(feed()):
        await asyncio.sleep(plan.seconds / 2)
        first, at = await _all_tokens(broker, demands), time.monotonic()
        await asyncio.sleep(plan.seconds / 2)

        async def decoded() -> float:
            return sum((await _all_tokens(broker, demands)).values()) - sum(first.values())

        await until(decoded, "the first tokens", START_S, every_s=_LOOK_S, check=fleet.check)
        rate = await decoded() / (time.monotonic() - at)
        feeding.set()
        await asyncio.sleep(plan.seconds / 2)
        before, asked, at = (
            await _all_tokens(broker, demands),
            {each.name: each.asked for each in demands},
            time.monotonic(),
        )
        await asyncio.sleep(plan.seconds)
        least, late = _LEAST_TOKENS * len(demands), at + _LONGEST * plan.seconds
        got, new, seconds = dict[str, float](), dict[str, float](), 0.0

        async def is_over() -> bool:
            """A share is of what was asked for and got in this time: no run may have one without the other."""
            nonlocal got, new, seconds
            after, seconds = await _all_tokens(broker, demands), time.monotonic() - at
            got = {name: after[name] - before[name] for name in after}
            new = {each.name: math.inf if math.isinf(each.share) else each.asked - asked[each.name] for each in demands}
            is_long = sum(got.values()) >= least or time.monotonic() > late
            return is_long and all((got[name] > 0) == (new[name] > 0) for name in got)

        limit_s = _LONGEST * plan.seconds + START_S
        await until(is_over, "each run to get what it asks for", limit_s, every_s=_LOOK_S, check=fleet.check)
        fleet.check()
    return got, new, seconds


async def _tokens(broker: Broker, demand: Demand) -> float:
    return float(await broker.client.hget(demand.keys.counts, "tokens") or 0)


async def _all_tokens(broker: Broker, demands: list[Demand]) -> dict[str, float]:
    return {each.name: await _tokens(broker, each) for each in demands}
