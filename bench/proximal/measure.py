"""One benchmark run: each engine in its own process, one at a time, all its parts, and the JSON object.

From a version's publication to the first token under it: this process publishes, the engine's worker serves a queue. It
is always in the middle of its sequences, and the gaps between versions are random, so every phase of its loop occurs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch

from sluice.bench.broker import Broker, enqueue, new_job, own_broker
from sluice.bench.engines import loaded, make_engine, random_ids
from sluice.bench.harness import HOME, aim, say
from sluice.bench.models import ENDLESS_CONTEXT, endless_model
from sluice.bench.processes import START_S, Fleet, Parent, engine_environment, run_settings
from sluice.bench.proximal.updates import Plan, score_cost, throughput
from sluice.bench.proximal.valid_share import valid_share
from sluice.bench.proximal.versions import Published, Publisher, Variants, ensure_variants
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.role import role_process
from sluice.pipeline.wire.messages import DecodeJob, Progress, SamplingParams
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.job_prompts import JobPrompts

THREADS = 1
_GAP_S = (0.3, 1.0)
_JOBS_A_ROW = 64  # far more than are decoded in that time
COST = {"hf": 1.15, "vllm": 1.5}  # most that an update which scores may be, over one which only re-prefills
RATES = {"50": 0.6, "200": 0.85, "1000": 0.95}  # least share of the rate without updates, by steps between them
VALID = 1.0  # share of the older tokens, however many versions the queue holds
_SCORE_WAIT_S = 600  # a busy machine must not affect what is valid


class Bench(NamedTuple):
    plan: Plan
    home: Path
    broker: Broker
    model: Path
    variants: Path

    def settings(self, run: str, *more: str) -> list[str]:
        return run_settings(run, self.model, f"run_dir={self.home}", "model.dtype=float32", *more)


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`publish_to_first_token_s`: see above. `score_cost_ratio`: an update that re-prefills and scores, over one that
    only re-prefills (`vs_kv_recompute`) and over one decode step (`vs_no_update`). `tok_s_by_interval`: tokens per
    second by steps between updates; `rate_share`: these over the rate without updates; `steps_between`: how many there
    really were for each update; `gap_s`: the longest time without a token at an update, median. `valid_share`: by
    versions in the queue. `aims`: each target, and whether it was met; `measured`: the conditions, in words.
    """
    model = endless_model(HOME)
    return {
        **fields(await _run(plan, home, model, ensure_variants(HOME, model))),
        "measured": measured(plan),
        "threads": THREADS,
        "dtype": "float32",
        "model": model.name,
    }


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of the parts; `parts` by part, then by backend (`share` has no backend)."""
    rates, share = parts["throughput"], parts["share"]
    found: dict[str, Any] = {
        "publish_to_first_token_s": parts["published"],
        "score_cost_ratio": parts["cost"],
        "tok_s_by_interval": {name: each["tok_s"] for name, each in rates.items()},
        "rate_share": {name: each["share"] for name, each in rates.items()},
        "valid_share": share["valid_share"],
    }
    return {
        **found,
        "aims": aims(found),
        "tok_s_spread": {name: each["spread"] for name, each in rates.items()},
        "updates_by_interval": {name: each["updates"] for name, each in rates.items()},
        "steps_between": {name: each["steps_between"] for name, each in rates.items()},
        "gap_s": {name: each["gap_s"] for name, each in rates.items()},
        "valid_share_tokens": share["measured"],
    }


def aims(found: Mapping[str, Any]) -> dict[str, Any]:
    """By field: the target, the value compared with it, and whether it was met; a target of None: only measured."""
    cost = {name: each["vs_kv_recompute"] for name, each in found["score_cost_ratio"].items()}
    least = min(found["valid_share"].values())
    return {
        "publish_to_first_token_s": {"aim": None},
        "score_cost_ratio": {
            name: {"aim": f"vs_kv_recompute <= {COST[name]}", "found": value, "met": value <= COST[name]}
            for name, value in cost.items()
        },
        "tok_s_by_interval": {"aim": None},
        "rate_share": {
            name: {key: aim(">=", RATES[key], share) for key, share in each.items() if key in RATES}
            for name, each in found["rate_share"].items()
        },
        "valid_share": aim(">=", VALID, least),
    }


def measured(plan: Plan) -> dict[str, str]:
    """By field, in words: rows, lengths in tokens, and what a ratio compares."""
    rows, prompt = f"{plan.rows} rows", f"prompts of {plan.prompt} tokens"
    return {
        "publish_to_first_token_s": f"{rows} and a queue, {prompt}, up to {ENDLESS_CONTEXT - plan.prompt} generated: "
        "from published_at (from_register: from the registration) to the first token under the new version",
        "score_cost_ratio": f"{rows}, {prompt}, {plan.generated} generated: from the call of an update that scores to "
        "the first token after it of the last row, over the same without scores, and over one decode step",
        "tok_s_by_interval": f"{rows}, {prompt}, 0 to {plan.longest} generated at the start of a segment of "
        f"{plan.segment} steps, {plan.segments} segments; steps between updates",
        "rate_share": "tok_s_by_interval over its rate without updates, segments in turns; an update that is due while "
        "one is on its way follows it, see steps_between",
        "valid_share": f"{plan.wave} sequences of up to {plan.wave_longest} tokens started under each of "
        f"{plan.retention + 1} versions; weights.retention and policy.max_token_staleness {plan.retention}",
    }


async def _run(plan: Plan, home: Path, model: Path, variants: Path) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {"published": {}, "cost": {}, "throughput": {}}
    async with own_broker(home / "broker") as broker:
        bench = Bench(plan, home, broker, model, variants)
        share = bench.settings(
            "share", "policy.enabled=true", "policy.advantage=reward", "scorer.claim_gpu=false",
            f"policy.max_token_staleness={plan.retention}", f"policy.score_wait_s={_SCORE_WAIT_S}",
            f"weights.retention={plan.retention}",
        )  # fmt: skip
        for name in dict.fromkeys((*plan.names, "hf")):  # the share is always measured with hf
            async with Fleet("scorer", home) as scorer:
                if name == "hf":  # it loads at the same time as the engine
                    await scorer.start_role("score", share, broker.url, engine_environment(THREADS))
                arguments = [name, str(model), str(variants), plan.rows]
                env = engine_environment(THREADS)
                async with Fleet.of_children(f"engine-{name}", home, serve, arguments, env=env) as running:
                    if name == "hf":
                        settings = [*share, f"broker.url={broker.url}"]
                        found = parts["share"] = await _measured(running, "share", plan, settings)
                        scorer.check()
                        by_held = ", ".join(f"{held} {part:.4f}" for held, part in found["valid_share"].items())
                        say(f"valid share by versions in the queue: {by_held}")
                        await scorer.end()  # nothing runs beside the engine while it is timed
                    if name in plan.names:
                        for part, found in (await _of_backend(running, name, bench)).items():
                            parts[part][name] = found
    return parts


async def _of_backend(running: Fleet, name: str, bench: Bench) -> dict[str, Any]:
    first = await _published(running, name, bench)
    say(f"{name}: {first['median']:.2f} s from publish to the first token, at worst {first['worst']:.2f} s")
    cost = await _measured(running, "cost", bench.plan)
    say(f"{name}: an update with scores costs {cost['vs_kv_recompute']:.3f} of one without")
    rates = await _measured(running, "throughput", bench.plan, home=str(bench.home / f"versions-{name}"))
    say(f"{name}: tok/s by interval " + ", ".join(f"{key} {rate:.0f}" for key, rate in rates["tok_s"].items()))
    say(f"{name}: share of the rate " + ", ".join(f"{key} {share:.2f}" for key, share in rates["share"].items()))
    return {"published": first, "cost": cost, "throughput": rates}


async def _measured(running: Fleet, *work: Any, **more: str) -> dict[str, Any]:
    return (await running.ask(Work(*work, **more), dict[str, Any]))[0]


class Work(msgspec.Struct, frozen=True):
    """What an engine's process measures. `home` is a directory for versions; with `serve` it is a decode worker that
    reports each Seen, until the next line, which it answers with `{}`."""

    part: Literal["cost", "throughput", "share", "serve"]
    plan: Plan
    settings: list[str] = []
    home: str = ""


class Seen(msgspec.Struct, frozen=True):
    """The first token under a version: Unix seconds, and how many sequences the engine had then."""

    version: int
    at: float
    sequences: int


async def _published(running: Fleet, name: str, bench: Bench) -> dict[str, Any]:
    """Seconds from `published_at` to the first token under the new version, and from its registration."""
    run, plan, queue = f"published-{name}", bench.plan, bench.broker.queue(f"published-{name}")
    more = [f"worker.max_batch={plan.rows}", "worker.checkpoint_tokens=0", "worker.drain_s=0"]
    await enqueue(queue, _long_jobs(run, plan))
    work = Work("serve", plan, bench.settings(run, *more, f"broker.url={bench.broker.url}"))
    (version,) = await running.ask(work, int, START_S)
    variants = Variants.read(bench.variants)
    publisher = Publisher(bench.broker.client, queue.keys, bench.home / run / "weights", variants, plan.retention)
    await publisher.owner.confirm()
    chance = random.Random(0)
    updates = list[tuple[Published, Seen]]()
    for newer in range(version + 1, version + plan.publishes + 2):
        now = await publisher.publish(newer)
        (seen,) = await running.receive(Seen, START_S)
        if seen.version != newer:
            raise SluiceError(f"the worker decodes under v{seen.version} after v{newer} was published")
        updates.append((now, seen))
        await asyncio.sleep(chance.uniform(*_GAP_S))
    running.send("stop")
    while await running.receive(dict[str, Any], START_S) != [{}]:
        pass
    del updates[0]  # at the first one the worker has only just started
    whole = [seen.at - now.published_at for now, seen in updates]
    registered = [seen.at - now.registered_at for now, seen in updates]
    return {
        "median": median(whole),
        "worst": max(whole),
        "from_register": {"median": median(registered), "worst": max(registered)},
        "publishes": len(whole),
        "fewest_sequences": min(seen.sequences for _, seen in updates),
    }


def _long_jobs(run: str, plan: Plan) -> list[DecodeJob]:
    """Greedy sequences with a third to all of the context."""
    chance = random.Random(1)
    longest = ENDLESS_CONTEXT - plan.prompt
    lengths = [chance.randint(longest // 3, longest) for _ in range(plan.rows * _JOBS_A_ROW)]
    samplings = [SamplingParams(temperature=0.0, max_new_tokens=length) for length in lengths]
    prompts = [TokenArray(random_ids(chance, plan.prompt)) for _ in lengths]
    return [new_job(run, str(at), samplings[at], prompt_token_ids=prompts[at]) for at in range(len(lengths))]


async def serve(parent: Parent, name: str, model: str, variants: str, max_batch: int) -> None:
    torch.set_num_threads(THREADS)
    async with loaded(make_engine(name, Path(model), max_batch)) as backend:
        parent.tell("ready")
        async for work in parent.requests(Work):
            parent.tell(await _do(backend, Variants.read(Path(variants)), work, parent))


async def _do(backend: Backend, variants: Variants, work: Work, parent: Parent) -> Any:
    if work.part == "cost":
        return await score_cost(backend, variants, work.plan)
    if work.part == "throughput":
        return await throughput(backend, variants, work.plan, Path(work.home))
    config, stop = load_config(None, work.settings), asyncio.Event()
    if work.part == "share":
        return await valid_share(backend, variants, work.plan, config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_serve_queue(backend, config, parent, stop))
        await parent.line()
        stop.set()
    return {}


async def _serve_queue(backend: Backend, config: Config, parent: Parent, stop: asyncio.Event) -> None:
    """Serve as a decode worker until `stop` is set; running jobs then go back to the queue."""
    async with role_process(config, "worker", "bench-worker", stop) as role:
        prompts = await asyncio.to_thread(JobPrompts, config.model)
        try:
            worker = DecodeWorker(role, cast("Backend", Observed(backend, parent.tell)), prompts)
            parent.tell(backend.version)
            await worker.run()
        finally:
            await prompts.close()


class Observed:
    """A backend that reports the first token under each version; everything else is the backend's own."""

    def __init__(self, backend: Backend, tell: Callable[[Seen], None]) -> None:
        self._backend, self._tell = backend, tell
        self._loop = asyncio.get_running_loop()
        self._newest, self._sequences = backend.version, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        self._sequences += 1
        try:
            return await self._backend.decode(replace(request, report_every=1, report=self._saw))
        finally:
            self._sequences -= 1

    def _saw(self, so_far: Progress) -> None:
        """In the engine's thread."""
        version = so_far.versions.runs[-1][0]
        if version > self._newest:
            self._newest = version
            self._loop.call_soon_threadsafe(self._tell, Seen(version, time.time(), self._sequences))
