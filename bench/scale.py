"""What a run costs when it is large, or idle; each part has its own broker.

    queued: a million jobs in the queue, a hundred workers that lease some of them ──────────────┐
    idle:   a hundred workers and no job ────────────────────────────────────────────────────────┼─▶ measure
    flow:   producer ─▶ engine that only answers ─▶ consumer ─▶ trainer that only acks, in one run ┘

- flow: rows, producer, consumer, history and the trainer's session are the real ones.
- `us_per_sequence`: mean over the sequences that end at a mark, from trained count to trained count.
- `traffic`: the roles' connections bear their names, so the broker itself says what each of them cost it.
- The trainer waits for a look at the start and behind the last two marks: a late one finds every role still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sluice.bench.broker import PAUSED_S, Broker, chunks, decode_job, enqueue, in_flight, own_broker, run_config
from sluice.bench.harness import HOME, BenchPlan, beside, by_count, say, until, write_rows
from sluice.bench.models import demo_model
from sluice.bench.processes import START_S, Fleet, Parent, memory_bytes, run_settings
from sluice.bench.queue.race import noop
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.pipeline import logs
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import DeadlineExceeded, EngineError, SluiceError
from sluice.pipeline.queue import NO_LIMIT, ArqWorker
from sluice.pipeline.run.role import default_name, role_process
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe

ANSWER = "7"
_THOUGHT = ", as seven apples are left of the nine that the shop had in the morning"  # of longer answers
_QUEUED, _IDLE, _FLOW = "queued", "idle", "scale"  # run names
_LEASE_S, _EACH, _MOST_DEATHS = 3600.0, 32, 3
_RENEW_S = 5.0  # of worker.renew_s
_SETTLE_S = 3.0
_SAMPLES, _FEWEST_SAMPLES = 500, 50  # of one batch; the last batch is full too
_TOMBSTONE_S = 2.0
_LOOK_S, _EXPIRY_S = 0.05, 30.0
_OTHER_KEYS = 10  # expiring keys: claims of roles


class Plan(BenchPlan, frozen=True, kw_only=True):
    """`count` jobs are queued, and as many sequences go through a run."""

    count: int
    workers: int
    idle_s: float
    tokens: int = 2
    max_batch: int = 256
    policy: bool = False

    BOUNDS = {"count": (1000, math.inf), "tokens": (2, 8192)}


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`redis_bytes_per_queued_job`: with credit lifted. `claim_us`, `renewal_share`: with many workers that lease 32
    jobs each from that queue. `us_per_sequence`: mean time of the last hundredth of the sequences at each mark, in one
    run. `cpu_us_per_sequence`: CPU time of each role between the last two marks; `cpu_us_at_marks`: over the same
    sequences as `us_per_sequence`. `rss_growth_share`: of each role, from the second mark to the last.
    `traffic`: commands, and bytes to and from the broker, of each role per sequence between the last two marks;
    empty on a broker that doesn't count them by connection (Valkey does from 8.1 on). `redis_bytes_end`: once the run
    is over. `idle_broker_share_100_workers`: of one core, by `idle_workers` workers without a job; `idle_commands_s`:
    commands per second of one of them.
    """
    async with own_broker(home / "idle") as broker:
        found: dict[str, Any] = await _idle(plan, broker, home)
    async with own_broker(home / "queued", durable=False) as broker:
        found |= await _queued(plan, broker)
    async with own_broker(home / "flow") as broker:
        return found | await flow(Marks(plan.count), broker, home, plan)


async def _queued(plan: Plan, broker: Broker) -> dict[str, float]:
    """Bytes per queued job; then the cost of claims by `workers` workers, and of renewing their leases."""
    queue = broker.queue(_QUEUED)
    before, started = await broker.used_bytes(), time.perf_counter()
    jobs = (decode_job(_QUEUED, number) for number in range(plan.count))
    await in_flight(enqueue(queue, chunk, NO_LIMIT) for chunk in chunks(jobs))
    per_job = (await broker.used_bytes() - before) / plan.count
    say(f"{plan.count:,} jobs queued in {time.perf_counter() - started:.0f} s, {per_job:.0f} bytes each")
    holders = [broker.queue(_QUEUED, f"w{number}") for number in range(plan.workers)]
    started = time.perf_counter()
    held = [(await holder.claim(_EACH, _LEASE_S, _MOST_DEATHS)).claims for holder in holders]
    claims_s, started = time.perf_counter() - started, time.perf_counter()
    for holder, claims in zip(holders, held, strict=True):
        await holder.renew(_LEASE_S, {claim.job_id: claim.attempt for claim in claims})
    return {
        "redis_bytes_per_queued_job": per_job,
        "leased_jobs": sum(map(len, held)),
        "claim_us": 1e6 * claims_s / plan.workers,
        "renewal_share": (time.perf_counter() - started) / _RENEW_S,
    }


async def _idle(plan: Plan, broker: Broker, home: Path) -> dict[str, float]:
    """Share of one core that the broker uses."""
    async with Fleet.of_children("idle", home, serve_idle, [broker.url, plan.workers]) as fleet:
        await asyncio.sleep(_SETTLE_S)
        commands, before = await broker.commands(), await broker.cpu_s()
        await asyncio.sleep(plan.idle_s)
        share = (await broker.cpu_s() - before) / plan.idle_s
        commands_s = (await broker.commands() - commands) / plan.idle_s / plan.workers
        fleet.check()
    say(f"{plan.workers} idle workers: {share:.4f} of a core in the broker, {commands_s:.2f} commands/s each")
    return {"idle_broker_share_100_workers": share, "idle_commands_s": commands_s, "idle_workers": plan.workers}


async def serve_idle(parent: Parent, url: str, workers: int) -> None:
    """Workers that wait, until SIGTERM, each with its own connections, lease keeper and heartbeat."""
    logs.configure("bench")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config, keys = run_config(_IDLE, url), Keys(_IDLE)

    async def wait(name: str) -> None:
        client = connect(config.broker)
        worker = ArqWorker([noop], client=client, keys=keys, config=config, name=name, stop=stop, handle_signals=False)
        async with beside(StatusReporter(client, keys, "worker", name).run()):
            await worker.main()
        await client.aclose()

    tasks = [asyncio.create_task(wait(f"worker-{number}")) for number in range(workers)]
    parent.tell("ready")
    await asyncio.gather(*tasks)


class Marks:
    """The marks of a run of `count` at which time per sequence is measured, and the progress over time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.span = count // 100  # sequences timed at each mark: 10,000 of a million
        self.marks = (self.span, 10 * self.span, 100 * self.span)  # each is the end of its span
        self.batch = min(_SAMPLES, max(_FEWEST_SAMPLES, self.span // 10))  # each costs the trainer an fsync
        self.rows = count + 8 * self.batch  # more than measured: the run must not drain before the last mark
        # Trained counts at which the trainer waits for a look; so far behind a mark that it's not in the time of one.
        self.stops = (0, *(mark + 4 * self.batch for mark in self.marks[1:]))
        self._trained: list[int] = []
        self._at: list[float] = []

    @property
    def trained(self) -> int:
        """Trained at the last look; -1 before the first."""
        return self._trained[-1] if self._trained else -1

    @property
    def seconds(self) -> float:
        return self._at[-1] - self._at[0]

    def saw(self, trained: int, at: float) -> None:
        """Each look finds more trained than the one before."""
        self._trained.append(trained)
        self._at.append(at)

    def us_at(self, mark: int) -> float:
        """Mean time of the `span` sequences that end at the mark."""
        begin, end = np.interp([mark - self.span, mark], self._trained, self._at)
        return 1e6 * float(end - begin) / self.span


async def flow(marks: Marks, broker: Broker, home: Path, plan: Plan) -> dict[str, Any]:
    data = home / "rows.jsonl"
    write_rows(data, (f"Say 7, time {number}." for number in range(marks.rows)), ANSWER)
    settings = run_settings(
        _FLOW, demo_model(HOME), f"run_dir={home / 'runs'}", f"data.path={data}",
        f"producer.samples_per_version={marks.batch}", f"producer.max_in_flight={8 * marks.batch}",
        "producer.max_staleness=2", f"worker.max_batch={plan.max_batch}", f"worker.keep_result_s={_TOMBSTONE_S}",
        "trainer.external=true", "metrics.enabled=false",
        f"broker.socket_timeout_s={PAUSED_S}",  # a new connection would count from 0
        *(("policy.enabled=true", "policy.advantage=reward") if plan.policy else ()),
    )  # fmt: skip
    start_bytes = await broker.used_bytes()
    async with contextlib.AsyncExitStack() as scope:
        roles = ("producer", "consumer", "worker", "trainer")  # they end the other way round
        fleets = {role: await scope.enter_async_context(Fleet(role, home)) for role in roles}
        watch = _Watch(marks, broker, fleets)
        url = {role: broker.url_as(role) for role in roles}
        await fleets["trainer"].start_child(serve_trainer, [settings, marks.stops], {"REDIS_URL": url["trainer"]})
        await fleets["worker"].start_child(serve_engine, [settings, plan.tokens], {"REDIS_URL": url["worker"]})
        await fleets["consumer"].start_role("consume", settings, url["consumer"])
        await fleets["producer"].start_role("produce", settings, url["producer"])
        await watch.run()
    await _until_expired(broker.client)
    return {**watch.fields(), "redis_bytes_start": start_bytes, "redis_bytes_end": await broker.used_bytes()}


class _Watch:
    def __init__(self, marks: Marks, broker: Broker, fleets: dict[str, Fleet]) -> None:
        self._marks, self._broker, self._fleets = marks, broker, fleets
        self._begun: dict[int, tuple[int, dict[str, float]]] = {}  # mark → trained, CPU seconds at its span's start
        self._before: tuple[int, dict[str, float]] = (0, {})  # likewise, at the newest look
        self._at: dict[int, dict[str, Any]] = {}  # mark → CPU seconds and bytes by role
        self._stops = marks.stops

    async def run(self) -> None:
        """Raises SluiceError if a role fails, DeadlineExceeded if there is no progress."""
        last = time.monotonic()
        while self._marks.trained < self._marks.rows:
            found = await self._broker.client.hgetall(Keys(_FLOW).counts)
            counts = {name: int(value) for name, value in found.items() if not name.startswith(b"last:")}
            if counts.get(b"dead") or counts.get(b"dropped"):
                raise SluiceError(f"not every sequence was trained: {counts}")
            trained, now = counts.get(b"trained", 0), time.monotonic()
            if self._marks.trained < 0 and counts.get(b"committed"):
                await self._look(0, now)  # every role is up, except for the first step
            if -1 < self._marks.trained < trained:
                last = now
                await self._look(trained, now)
            self._check(trained)
            if now - last > START_S:
                raise DeadlineExceeded(f"nothing was trained for {START_S:.0f} s: {counts}")
            await asyncio.sleep(_LOOK_S)

    async def _look(self, trained: int, at: float) -> None:
        """Record what reached marks and the starts of their spans need from this look."""
        self._marks.saw(trained, at)
        used = await self._used_s()
        for mark in self._marks.marks:
            if mark in self._at or trained < mark - self._marks.span:
                continue
            if trained < mark:
                self._begun.setdefault(mark, (trained, used))
            else:
                begun, before = self._begun.get(mark, self._before)  # the span may end before the first look at it
                pids = {role: fleet.processes[0].pid for role, fleet in self._fleets.items()}
                self._at[mark] = {
                    "cpu_s": used,
                    "traffic": await self._broker.traffic(),
                    "cpu_us_at_marks": {role: 1e6 * (used[role] - before[role]) / (trained - begun) for role in used},
                    "rss_bytes": {role: memory_bytes("VmRSS", pid, children=False) for role, pid in pids.items()},
                    "redis_bytes": await self._broker.used_bytes(),
                }
                say(f"{trained:,} sequences: {self._marks.us_at(mark):.0f} us each")
        self._before = trained, used
        if self._stops and trained >= self._stops[0]:
            self._stops = later(self._stops, trained)
            self._fleets["trainer"].send("go on")

    async def _used_s(self) -> dict[str, float]:
        cpu_s = {role: fleet.cpu_s() for role, fleet in self._fleets.items()}
        return cpu_s | {"broker": await self._broker.cpu_s()}

    def _check(self, trained: int) -> None:
        for role, fleet in self._fleets.items():
            done = role == "producer" or trained >= self._marks.count
            if not (done and all(process.returncode in (None, 0) for process in fleet.processes)):
                fleet.check()

    def fields(self) -> dict[str, Any]:
        _, middle, end = self._marks.marks
        us = [self._marks.us_at(mark) for mark in self._marks.marks]
        before, after = self._at[middle], self._at[end]
        cpu_s = {role: used - before["cpu_s"][role] for role, used in after["cpu_s"].items()}
        spent = {role: traffic - before["traffic"][role] for role, traffic in after["traffic"].items()}
        growth = {role: used / before["rss_bytes"][role] - 1 for role, used in after["rss_bytes"].items()}
        return {
            "us_per_sequence": by_count(dict(zip(self._marks.marks, us, strict=True))),
            "us_ratio": us[-1] / us[0],
            "cpu_us_per_sequence": {role: 1e6 * used / (end - middle) for role, used in cpu_s.items()},
            "traffic": {role: traffic.per(end - middle) for role, traffic in spent.items() if role in self._fleets},
            **{
                name: by_count(self._at, lambda at, name=name: at[name])
                for name in after
                if name not in ("cpu_s", "traffic")
            },
            "rss_growth_share": growth,
            "sequences": self._marks.count,
            "run_s": self._marks.seconds,
        }


async def _until_expired(client: Any) -> None:
    """Wait until the tombstones have expired (worker.keep_result_s), or for long enough."""

    async def expired() -> bool:
        return (await client.info("keyspace")).get("db0", {}).get("expires", 0) <= _OTHER_KEYS

    with contextlib.suppress(DeadlineExceeded):
        await until(expired, "tombstones to expire", _EXPIRY_S, every_s=_LOOK_S)


def later(stops: Sequence[int], trained: int) -> tuple[int, ...]:
    return tuple(stop for stop in stops if stop > trained)


async def serve_trainer(_: Parent, settings: list[str], stops: Sequence[int]) -> None:
    """A trainer that only acks, to the end of the run; at each stop it waits for a line."""
    from sluice.consumers.training.handoff import finish
    from sluice.consumers.training.session import Session
    from sluice.consumers.training.session_thread import SessionThread

    def ack_all() -> None:
        thread = SessionThread(config, ())
        thread.start()
        left, trained, complete = stops, 0, False
        while not complete:
            if left and trained >= left[0]:
                left = later(left, trained)
                sys.stdin.readline()
            if samples := thread.call(Session.take):
                complete = thread.call(lambda session: finish(session, {}))
                trained += len(samples)
            else:
                complete = thread.call(Session.complete)
        thread.stop(finished=True)

    logs.configure("trainer")
    config = load_config(None, settings)
    await asyncio.to_thread(ack_all)


async def serve_engine(_: Parent, settings: list[str], tokens: int) -> None:
    """A decode worker whose engine only answers, until SIGTERM."""
    from sluice.workers.decode_worker import DecodeWorker
    from sluice.workers.job_prompts import JobPrompts

    config = load_config(None, settings)
    async with role_process(config, "worker", default_name("worker")) as role:
        prompts = JobPrompts(config.model, config.images)
        try:
            await DecodeWorker(role, AnsweringBackend(Path(config.model.path), tokens), prompts).run()
        finally:
            await prompts.close()


class AnsweringBackend:
    """The same tokens for every prompt, at once."""

    version = 0
    versions: Mapping[str, int] = MappingProxyType({"": 0})
    images_processed = 0

    def __init__(self, model: Path, tokens: int) -> None:
        codec = HFTextCodec(model)
        thought = codec.encode(ANSWER + _THOUGHT * tokens)[: tokens - 1]
        self._token_ids, self._text = [*thought, codec.eos_token_ids[0]], codec.decode(thought)
        self.facts = EngineFacts(
            name="hf", engine_version="answers", device="cpu", dtype="float32", model=str(model),
            vocab_size=1 << 20, eos_token_ids=tuple(codec.eos_token_ids), context_length=1 << 16,
        )  # fmt: skip

    async def start(self) -> None: ...

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        count = len(self._token_ids)
        sampled = SampledTokens(list(self._token_ids), [-0.5] * count, [0] * count)
        prompt, text = request.prompt_token_ids, self._text
        return SequenceOutput(request.seq_key, prompt, sampled, text=text, raw_text=text, finish_reason="stop")

    def abort(self, seq_key: str) -> None: ...

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        raise EngineError(f"an engine without weights was given {directory}")

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        raise EngineError(f"an engine without weights was given {directory}")

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> float:
        raise EngineError("an engine without weights cannot score")

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        raise EngineError("an engine without a guard")

    async def close(self) -> None: ...

    def progress(self) -> float:
        return time.monotonic()  # it never hangs
