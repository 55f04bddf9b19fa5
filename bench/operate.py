"""What it costs to watch a run: the dashboard's pages with a long history, `sluice --help`, and metrics.

- Pages alternate, so none is requested twice in a row; meanwhile a browser keeps the live stream open.
- The history: finished sequences on disk; jobs, dead letters and processes in the broker. Prompts and truths are
  the demo's scenes, an answer is the truth with one wrong digit, logprobs are random; the consumer's own steps make
  the samples, and its recorder writes them. Nothing is decoded.
- Help starts a new interpreter each time, as a shell does; the first start warms the file cache.
- Both sides of the throughput comparison have their own broker and workers; the side not being measured is stopped
  (SIGSTOP). The workers' CPU time is compared as well: it is steadier on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec.structs import replace

from sluice.bench import pipeline as bench_pipeline
from sluice.bench.broker import CHUNK, Broker, decode_job, enqueue, own_broker
from sluice.bench.harness import HOME, BenchPlan, aim, beside, median_of, percentile, play, ratios, say, spread, until
from sluice.bench.http import free_ports, get_s, open_session, until_healthy
from sluice.bench.models import demo_model
from sluice.bench.pipeline import QueuedEngines, Sample
from sluice.bench.processes import Fleet
from sluice.bench.traces import measure_spans
from sluice.consumers.groups import Group
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.recorder import Recorder
from sluice.consumers.history.records import SequenceFilter
from sluice.consumers.run_files import METRICS
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue import NO_LIMIT, job_id_for
from sluice.pipeline.queue.dead_letters import DeadLetters
from sluice.pipeline.run import provenance
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_RUN = "operate"
_GROUP = 4  # sequences of a job
_INDEXED_S = 600.0
_AIMS = {"dashboard_p95_ms_max": 150.0, "help_s": 0.3, "metrics_overhead": 0.01, "trace_overhead": 0.01}
_WARM_PAGES, _WARM_SEQUENCES = 2, 64
_HELP_S = 60
_SCRAPE_EVERY_S = 1.0
_SCENES = 256  # distinct ones
_OTHER, _WORD = "operate-before", "seven"
_METRICS = (
    "train/loss", "policy/loss", "policy/reward_mean", "policy/approx_kl", "policy/version_lag_mean", "rollout/f1",
    "rollout/gen_new_tokens_mean", "rollout/gen_new_tokens_total", "train/step_s", "train/score_s", "train/publish_s",
)  # fmt: skip
_FLUSH_EVERY = 500
_PROCESSES = 16


class Plan(BenchPlan, frozen=True, kw_only=True):
    sequences: int = msgspec.field(default=100_000, name="finished")  # in the history
    queued: int = 512  # jobs in the queue, and as many dead letters
    requests: int = 40  # of each page
    helps: int = 15  # starts of `sluice --help`
    rounds: int = 12  # with and without metrics
    per_round: int = msgspec.field(default=384, name="sequences")
    workers: int = 2
    spans: int = 4096  # sequences whose spans are sent

    QUICK = {
        "spans": 128,
        "sequences": 400,
        "queued": 20,
        "requests": 2,
        "helps": 1,
        "rounds": 1,
        "per_round": 16,
        "workers": 1,
    }


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`dashboard_p95_ms`: milliseconds by page, with `finished` sequences in the history (`dashboard_p95_ms_max`: of
    the slowest page; `curves`, `search`, `group`, `compare`: four of them). `indexed_s`: seconds until the dashboard
    has indexed that history. `help_s`: seconds of `sluice --help`, median. `metrics_overhead`: 1 - tokens per second
    with metrics scraped every second over tokens per second without, median of the rounds. `trace_overhead`: CPU time
    of a span (`span_cpu_us`) times `spans_per_sequence`, over that of the workers for a sequence (`sequence_cpu_us`).
    """
    found: dict[str, Any] = {"help_s": median([_help_s() for _ in range(plan.helps + 1)][1:])}
    say(f"help: {found['help_s']:.3f} s")
    async with own_broker(home / "one") as one:
        found |= await _pages(plan, home, one)
        async with own_broker(home / "two") as two:
            found |= await _overhead(plan, home, {"with-metrics": one, "without": two})
    async with Fleet("collector", home) as fleet:
        found |= await measure_spans(fleet, plan.spans)
    per_sequence_us = found["span_cpu_us"] * found["spans_per_sequence"]
    found["trace_overhead"] = per_sequence_us / found["sequence_cpu_us"]
    say(f"traces: {per_sequence_us:.0f} us of {found['sequence_cpu_us']:.0f} us per sequence")
    return {**found, "aims": aims(found)}


def aims(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: aim("<=", most, found[name]) for name, most in _AIMS.items()}


def _help_s() -> float:
    started = time.monotonic()
    done = subprocess.run(sluice_command("--help"), capture_output=True, timeout=_HELP_S, check=False)
    if done.returncode or b"sluice" not in done.stdout:
        why = done.stderr.decode(errors="replace")[-300:]
        raise SluiceError(f"`sluice --help` ended with {done.returncode}: {why}")
    return time.monotonic() - started


async def _pages(plan: Plan, home: Path, broker: Broker) -> dict[str, Any]:
    """Milliseconds by page, with a long history."""
    settings = [f"run={_RUN}", f"run_dir={home}", f"broker.url={broker.url}", f"model.path={demo_model(HOME)}"]
    config = load_config(None, settings, environ={})
    started = time.monotonic()
    await fill_history(config, plan.sequences)
    say(f"history: {plan.sequences} sequences recorded in {time.monotonic() - started:.1f} s")
    await fill_broker(broker, config, plan.queued)
    for name in (_RUN, _OTHER):
        write_steps(home / name, plan.sequences)
    resolved = provenance.store(config, home / _RUN)
    paths = await _paths(config, broker.client)
    (port,) = free_ports(1)
    site = f"http://127.0.0.1:{port}"
    times: dict[str, list[float]] = {name: [] for name in paths}
    async with Fleet("dashboard", home) as fleet, open_session() as session:
        command = sluice_command("dashboard", "-c", str(resolved), "--set", f"dashboard.port={port}")
        await fleet.start(command, {"REDIS_URL": broker.url, "SLUICE_DASHBOARD_KEY": ""})
        await until_healthy(session, site, fleet)
        started = time.monotonic()

        async def is_indexed() -> bool:
            """A search doesn't say that sequences are missing in it."""
            async with session.get(f"{site}/sequences?text={quote(_WORD)}") as answer:
                return answer.status == 200 and "indexed yet" not in await answer.text()

        await until(is_indexed, "the dashboard to index the history", _INDEXED_S, every_s=0.5)
        indexed_s = time.monotonic() - started
        say(f"index: {plan.sequences} sequences within {indexed_s:.1f} s of the dashboard's start")
        async with beside(_look(session, site)):
            for turn in range(plan.requests + _WARM_PAGES):
                for name, path in paths.items():
                    took_s = await get_s(session, site + path)
                    if turn >= _WARM_PAGES:
                        times[name].append(1000 * took_s)
    p50, p95 = ({name: percentile(each, share) for name, each in times.items()} for share in (0.5, 0.95))
    worst = max(p95, key=lambda name: p95[name])
    say(f"dashboard: the slowest page is {worst}, p95 {p95[worst]:.1f} ms with {plan.sequences} finished sequences")
    files = {path.name: path.stat().st_size for path in (home / _RUN / "history").iterdir()}
    index = sum(size for name, size in files.items() if name.startswith("index."))
    return {
        **{name: p95[name] for name in ("curves", "search", "group", "compare")},
        "indexed_s": indexed_s,
        "index_bytes_per_sequence": index / plan.sequences,
        "dashboard_p95_ms": p95,
        "dashboard_p50_ms": p50,
        "dashboard_p95_ms_max": p95[worst],
        "history_bytes_per_sequence": (sum(files.values()) - index) / plan.sequences,
    }


async def _paths(config: Config, client: Any) -> dict[str, str]:
    """Path of every page, by name."""
    with contextlib.closing(HistoryReader(history_directory(config))) as reader:
        newest = reader.sequences(SequenceFilter(), limit=50)
    middle = newest.rows[len(newest.rows) // 2]
    letters = [row.letter.seq_id async for row in DeadLetters(client, config).rows()]
    part = quote(middle.job_id.rpartition(":")[2][:6])
    return {
        "overview": "/",
        "curves": "/curves",
        "compare": f"/runs/curves?with={config.run}&with={_OTHER}",
        "runs": f"/runs?with={config.run}&with={_OTHER}",
        "search": f"/sequences?text={quote(_WORD)}",
        "sequences, sorted": "/sequences?sort=longest&finish_reason=stop",
        "group": f"/jobs/{quote(middle.job_id, safe=':')}",
        "jobs": "/jobs",
        "jobs, searched": f"/jobs?search={part}",
        "job": f"/jobs/{quote(newest.rows[0].job_id, safe=':')}",
        "sequences": "/sequences",
        "sequences, filtered": "/sequences?finish_reason=length&triggered=yes",
        "sequences, searched": f"/sequences?search={part}",
        "sequences, next page": f"/sequences?before={quote(newest.next)}",
        "sequence": f"/sequences/{quote(middle.seq_id, safe=':')}",
        "workers": "/workers",
        "weights": "/weights",
        "dead letters": "/dead-letters",
        "dead letter": f"/dead-letters/{quote(letters[-1], safe=':')}",
        "config": "/config",
    }


def write_steps(directory: Path, count: int) -> None:
    """What the trainer of a run of `count` sequences would have written, one step per 64 sequences."""
    directory.mkdir(parents=True, exist_ok=True)
    steps, rng, now = max(2, count // 64), random.Random(0), time.time()
    with (directory / METRICS).open("w") as stream:
        for step in range(1, steps + 1):
            values = {key: 1 / step + 0.1 * rng.random() for key in _METRICS}
            line = {"step": step, "version": step - 1, "at": now - 2 * (steps - step), **values}
            stream.write(json.dumps(line) + "\n")


async def _look(session: aiohttp.ClientSession, site: str) -> None:
    """A browser that shows the overview."""
    async with session.get(f"{site}/events", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        async for _ in stream.content.iter_any():
            pass


async def _scrape(session: aiohttp.ClientSession, addresses: list[str]) -> None:
    """Scrape every worker's metrics once a second."""
    while True:
        await asyncio.sleep(_SCRAPE_EVERY_S)
        for address in addresses:
            await get_s(session, f"http://{address}/metrics")


async def _overhead(plan: Plan, home: Path, brokers: dict[str, Broker]) -> dict[str, Any]:
    load = bench_pipeline.Plan(sequences=plan.per_round, workers=plan.workers, rounds=plan.rounds, max_batch=32)
    sides, addresses, shared = dict[str, QueuedEngines](), list[str](), load.settings()
    async with contextlib.AsyncExitStack() as scope:
        session = await scope.enter_async_context(open_session())
        for name, broker in brokers.items():
            fleet = await scope.enter_async_context(Fleet(name, home))
            settings = [*shared, f"metrics.enabled={str(name == 'with-metrics').lower()}"]
            side = sides[name] = QueuedEngines(plan.workers, settings, fleet, broker)
            await side.start()
            if name == "with-metrics":
                addresses = [facts["metrics"] for facts in await broker.serving(bench_pipeline.RUN)]
            await side.round(load.jobs("warm", min(_WARM_SEQUENCES, plan.per_round)))

        async def one(name: str, number: int) -> Sample:
            work = load.jobs(f"round-{number}", plan.per_round)
            async with beside(_scrape(session, addresses)) if name == "with-metrics" else contextlib.nullcontext():
                return (await sides[name].round(work))[0]

        def check(_: int, found: Mapping[str, Sample]) -> None:
            metrics, without = (found[name].num_tokens for name in ("with-metrics", "without"))
            if metrics != without:
                raise SluiceError(f"{metrics} tokens with metrics, {without} without; ratios would be unfair")

        rounds = await play(plan.rounds, ("without", "with-metrics"), one, check)
    both = ("with-metrics", "without")
    wall = [1 - share for share in ratios(rounds, *both, lambda sample: sample.tok_s)]
    cpu = [share - 1 for share in ratios(rounds, *both, lambda sample: sample.cpu_s) if share]
    say(f"metrics: overhead {median(wall):.4f} by tokens/s, {median(cpu):.4f} by processor time")
    return {
        "metrics_overhead": median(wall),
        "metrics_overhead_range": spread(wall),
        "metrics_overhead_cpu": median(cpu),
        "sequence_cpu_us": 1e6 * median_of(rounds, "without", lambda one: one.cpu_s) / plan.per_round,
        "metrics_overhead_cpu_range": spread(cpu),
        **{f"tok_s_{side.replace('-', '_')}": median_of(rounds, side, lambda one: one.tok_s) for side in both},
    }


async def fill_history(config: Config, count: int) -> None:
    """`count` finished sequences in groups of four, each with a reward; raises SluiceError if not all were recorded."""
    codec = HFTextCodec(config.model.path)
    task = load_task(config.rollout_matching)
    context = TaskContext(codec=codec, options=config.rollout_matching, seed=config.seed, policy=config.policy)
    sampler, recorder = Sampler(task, context, config.consumer), Recorder(config, 0)
    try:
        made: dict[str, TrainingSample] = {}
        rng, results = random.Random(1), _results(config.run, codec, count)
        for number in range(0, count, _GROUP):
            members = list(itertools.islice(results, _GROUP))
            first, size = members[0], len(members)
            if first.text not in made:
                alone = Group(first.group_id, 1, {(0, 0): first}, [], {0: 1})
                [made[first.text]], _ = sampler.samples_of(alone)
            sample = replace(made[first.text], group_id=first.group_id)
            samples = [replace(sample, seq_id=each.seq_id, reward=rng.random()) for each in members]
            group = Group(first.group_id, size, parts=dict.fromkeys(range(size), 1))
            group.members |= {(each.index, 0): each for each in members}
            recorder.note(group, samples, [])
            if number % _FLUSH_EVERY < _GROUP:
                await recorder.flush()
        await recorder.flush()
    finally:
        await recorder.close()
    with contextlib.closing(HistoryReader(history_directory(config))) as reader:
        kept = sum(reader.totals().values())
    if kept != count:  # a full disk, say: the recorder never fails its role
        raise SluiceError(f"only {kept} of {count} sequences are in the history; the warning above says why")


async def fill_broker(broker: Broker, config: Config, count: int) -> None:
    """Dead letters, then as many waiting jobs, and heartbeats of processes."""
    queue = broker.queue(config.run, "worker-0")
    await enqueue(queue, [decode_job(config.run, number) for number in range(count)], NO_LIMIT)
    while (claimed := await queue.claim(CHUNK, 60, 3)).claims:
        for claim in claimed.claims:
            await queue.fail(claim, "invalid_request", "the prompt has 2048 tokens, and the model's context is 1024")
    await enqueue(queue, [decode_job(config.run, number) for number in range(count, 2 * count)], NO_LIMIT)
    for number in range(_PROCESSES):
        reporter = StatusReporter(broker.client, queue.keys, "worker", f"worker-{number}")
        reporter.fact(version=12, running=32, sequences=1000 + number, tokens=97_000 + number)
        await reporter.beat()


def _results(run: str, codec: HFTextCodec, count: int) -> Iterator[SequenceResult]:
    from sluice.demo.digits.data import answer_text, messages_of
    from sluice.demo.digits.scenes import scenes

    shown: list[tuple[list[int], list[int], str, Any]] = []  # the prompt's tokens, the answer's, answer, truth
    for scene in scenes("train", _SCENES, 3):
        text = answer_text([{**scene.objects[0], "desc": "eight"}, *scene.objects[1:]])
        prompt = codec.encode(str(messages_of(scene)[0]["content"]))
        shown.append((prompt, [*codec.encode(text), codec.eos_token_ids[0]], text, list(scene.objects)))
    rng, now = random.Random(0), time.time()
    sampling = SamplingParams(max_new_tokens=128)
    for number in range(count):
        prompt, tokens, text, truth = shown[number // _GROUP % len(shown)]
        job_id, version = job_id_for(run, f"past:{number // _GROUP}", 0, sampling, _GROUP), number // 1000
        half = len(tokens) // 2
        yield SequenceResult(
            seq_id=f"{job_id}:{number % _GROUP}", group_id=job_id, group_size=_GROUP, index=number % _GROUP,
            worker=f"worker-{number % _PROCESSES}", backend="hf", engine_version="bench",
            prompt_token_ids=TokenArray(prompt), token_ids=TokenArray(tokens),
            logprobs=FloatArray([-rng.random() for _ in tokens]),
            versions=Runs.of([version] * half + [version + 1] * (len(tokens) - half)), text=text, raw_text=text,
            finish_reason="length" if number % 50 == 0 else "stop",
            triggers={"repeat_terminate": int(number % 400 == 0)}, sampling=sampling,
            timings={"enqueued_at": now - count + number, "queue_s": 0.2, "decode_s": 0.4}, truth=truth,
        )  # fmt: skip
