"""Workers that come and go all the time: what that costs a run, what is decoded twice, and what a new worker waits for.

    feed ─jobs─▶ broker ─▶ W × `sluice worker` ─results─▶ feed: each id once, tokens by window
                                 ▲
    scheduler: every life_s / W seconds a new worker; once it serves, the oldest one ends

- Two windows in turns: in one every worker lives on, in the other each lives for `life_s`. One of three
  ends by SIGKILL, the others by SIGTERM, then SIGKILL after `grace_s`, as a pod does.
- The feed keeps more jobs waiting than all workers take. At the end it stops, and what it enqueued has to arrive.
- Tokens that a worker had sampled, and that another one samples again, aren't stored anywhere. Of a sequence that goes
  on from what was stored, they are between none and `checkpoint_tokens`: half of that at the mean. Of one that starts
  again: how long the attempt ran by the job's log, at the pace of the attempt that ended it, and no more than that key.
- A worker reports the parts of its own start (`start_s` in its heartbeat). `alone`: nothing else runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sluice.bench.broker import Broker, enqueue, new_job, own_broker
from sluice.bench.engines import random_ids
from sluice.bench.harness import HOME, BenchPlan, aim, beside, median_of, play, ratios, say, spread, until
from sluice.bench.models import endless_model
from sluice.bench.pipeline import Arrival, Sink
from sluice.bench.processes import START_S, Fleet, engine_environment, run_settings
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue.live_jobs import JobEvent, parse_log
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import TokenArray

RUN = "elastic"
SIDES = ("undisturbed", "disturbed")
_PROMPT = 48  # tokens
_SHORTEST, _LONGEST = 64, 512  # new tokens
_CHECKPOINT = 64  # tokens
_DRAIN_S, _LEASE_S = 20.0, 15.0
_KILLED_OF = 3  # replacements, of which one is killed
_LOOK_S = 0.5
_AIMS = {"rate_share": (">=", 0.9), "redone_share": ("<=", 0.01), "lost": ("<=", 0)}


class Plan(BenchPlan, frozen=True, kw_only=True):
    workers: int = 2
    rounds: int = 2  # of one window of each kind
    window_s: float = 120.0
    life_s: float = 60.0  # of a worker, in a disturbed window
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    max_batch: int = 16
    starts: int = 3  # of a worker on an idle machine
    vllm: bool = True

    QUICK = {
        "workers": 1, "rounds": 1, "window_s": 24.0, "life_s": 12.0, "grace_s": START_S, "max_batch": 4, "starts": 1,
        "vllm": False,
    }  # fmt: skip

    def __post_init__(self) -> None:
        if not self.replacements:
            raise ConfigError(
                f"no worker would be replaced: --window-s {self.window_s:g} with --workers {self.workers} is less than "
                f"--life-s {self.life_s:g}"
            )

    @property
    def engines(self) -> tuple[str, ...]:
        """Whose start is measured alone."""
        return ("hf",) if self.why_no_vllm else ("hf", "vllm")

    @property
    def replacements(self) -> int:
        """In a disturbed window."""
        return int(self.window_s * self.workers / self.life_s)


class Window(NamedTuple):
    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`rate_share`: tokens per second while workers are replaced, over those while none is; median of the rounds.
    `redone_share`: tokens that were sampled again, over all that were sampled in disturbed windows, prefill apart
    (`redone_share_most`: as if each sequence had lost a whole checkpoint's). `lost`, `twice`: jobs that never arrived,
    that arrived more than once. `new_worker_s`: from the start of a replacement's process to its first token, and its
    parts, medians; `new_worker_alone_s`: the same on an idle machine, by engine.
    """
    model = endless_model(HOME)
    async with own_broker(home / "broker") as broker:
        alone = {name: await _alone(name, plan, home, model, broker) for name in plan.engines}
        async with Workers("hf", plan, home, model, broker).running() as workers:
            feed = Feed(broker, workers, 3 * plan.max_batch * (plan.workers + 1))
            async with beside(feed.run()), beside(workers.watch()):
                for _ in range(plan.workers):
                    await workers.add()
                await workers.until_all_decode()

                async def one(side: str, number: int) -> Window:
                    tokens, began = feed.tokens, time.monotonic()
                    if side == "disturbed":
                        await workers.replace_all(plan)
                    await asyncio.sleep(max(0.0, began + plan.window_s - time.monotonic()))

                    async def some_arrived() -> bool:
                        return feed.tokens > tokens

                    await until(some_arrived, f"results, {side}", START_S, check=workers.check)
                    return Window(feed.tokens - tokens, time.monotonic() - began)

                windows = await play(plan.rounds, SIDES, one, show=lambda window: f"{window.tok_s:.0f} tok/s")
                feed.stop()
                await until(feed.is_done, "the last results", START_S, check=workers.check)
    return {**fields(windows, feed, workers), **_starts(alone, workers)}


def fields(windows: Sequence[Mapping[str, Window]], feed: Feed, workers: Workers) -> dict[str, Any]:
    disturbed = sum(each["disturbed"].tokens for each in windows)
    shares = ratios(windows, "disturbed", "undisturbed", lambda window: window.tok_s)
    found = {
        "rate_share": median(shares),
        "redone_share": feed.redone.estimated / (disturbed + feed.redone.estimated),
        "lost": len(feed.waiting),
        "twice": sum(count > 1 for count in feed.arrived.values()),
    }
    return {
        **found,
        "rate_share_range": spread(shares),
        "redone_share_most": feed.redone.most / (disturbed + feed.redone.most),
        "redone_sequences": feed.redone.sequences,
        "tok_s": {side: median_of(windows, side, lambda window: window.tok_s) for side in SIDES},
        "tokens_disturbed": disturbed,
        "jobs": len(feed.arrived),
        "replaced": sum(workers.ends.values()),
        "ends": dict(workers.ends),
        "checkpoint_tokens": _CHECKPOINT,
        "aims": {name: aim(sign, bound, found[name]) for name, (sign, bound) in _AIMS.items()},
    }


def _starts(alone: Mapping[str, Sequence[Mapping[str, float]]], workers: Workers) -> dict[str, Any]:
    replaced = [parts for member, parts in workers.starts.items() if member in workers.replacements]
    return {
        "new_worker_s": median(sum(parts.values()) for parts in replaced) if replaced else None,
        "new_worker_parts": _medians(replaced),
        "new_workers_seen": len(replaced),
        "new_worker_alone_s": {name: median(sum(parts.values()) for parts in each) for name, each in alone.items()},
        "new_worker_alone_parts": {name: _medians(each) for name, each in alone.items()},
    }


def _medians(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: median(each[part] for each in starts) for part in starts[0]} if starts else {}


@dataclass
class Member:
    """A worker's process; `ending_at`: Unix seconds of the first signal."""

    name: str
    fleet: Fleet
    ending_at: float | None = None
    killed_at: float | None = None


class Workers:
    """What a scheduler does: it starts processes, waits until they serve, and ends them."""

    def __init__(self, backend: str, plan: Plan, home: Path, model: Path, broker: Broker) -> None:
        self._settings = run_settings(
            RUN, model, f"run_dir={home}", f"worker.backend={backend}", f"worker.max_batch={plan.max_batch}",
            "model.dtype=float32", f"worker.checkpoint_tokens={_CHECKPOINT}", f"worker.drain_s={_DRAIN_S}",
            f"worker.lease_s={_LEASE_S}", "worker.max_attempts=1000", "worker.vllm.enforce_eager=true",
        )  # fmt: skip
        self._kind, self._home, self._broker, self._grace_s = backend, home, broker, plan.grace_s
        self._up: list[Member] = []
        self.gone: dict[str, Member] = {}
        self.starts: dict[str, dict[str, float]] = {}  # parts in seconds, by name, once it has decoded
        self.replacements = set[str]()
        self.ends: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Workers]:
        """All end after the block."""
        try:
            yield self
        finally:
            await asyncio.gather(*(member.fleet.end() for member in self._up))

    async def add(self) -> Member:
        """Start one more."""
        fleet = Fleet(f"{self._kind}{len(self._up) + len(self.gone)}", self._home)
        await fleet.start_role("worker", self._settings, self._broker.url, engine_environment())
        member = Member(fleet.name(0), fleet)
        self._up.append(member)
        return member

    def check(self) -> None:
        """Raise SluiceError if one has ended by itself."""
        for member in self._up:
            member.fleet.check()

    async def watch(self) -> None:
        """Note what the workers say of their starts, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        for row in (await self._broker.snapshot(RUN)).alive("worker"):
            if parts := row.facts.get("start_s"):
                self.starts[row.name] = parts

    async def until_decoded(self, member: Member) -> None:
        """Wait until it has decoded its first sequence."""

        async def has() -> bool:
            await self.look()
            return member.name in self.starts

        await until(has, f"the first token of {member.name}", START_S, check=self.check)

    async def until_all_decode(self) -> None:
        for member in self._up:
            await self.until_decoded(member)

    async def replace_all(self, plan: Plan) -> None:
        """The replacements of a window, evenly spread over it."""
        gap_s, began = plan.window_s / plan.replacements, time.monotonic()
        for number in range(plan.replacements):
            await asyncio.sleep(max(0.0, began + (number + 0.2) * gap_s - time.monotonic()))
            newest = await self.add()
            self.replacements.add(newest.name)
            await self.until_decoded(newest)
            await self.end(self._up[0], kill=sum(self.ends.values()) % _KILLED_OF == 1)

    async def end(self, member: Member, *, kill: bool) -> None:
        """SIGKILL; or SIGTERM, and SIGKILL after the grace. Returns when it is gone."""
        self._up.remove(member)
        self.gone[member.name] = member
        [process] = member.fleet.processes
        member.ending_at = time.time()
        if not kill:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._grace_s)
        how = "SIGTERM"
        if process.returncode is None:
            how = "SIGKILL" if kill else "SIGKILL after the grace"
            member.killed_at = time.time()
            process.kill()
            await process.wait()
        self.ends[how] += 1
        say(f"{member.name} ended by {how}")


async def _alone(name: str, plan: Plan, home: Path, model: Path, broker: Broker) -> list[dict[str, float]]:
    """Parts of the start of a worker for which one job waits, nothing beside it."""
    found: list[dict[str, float]] = []
    queue, chance = broker.queue(RUN), random.Random(0)
    (home / name).mkdir()
    async with Workers(name, plan, home / name, model, broker).running() as workers:
        sink = Sink(broker, workers, RUN)
        await sink.open()
        for number in range(plan.starts if name == "hf" else 1):
            await enqueue(queue, [_job(f"{name}-{number}", _SHORTEST, chance)])
            member = await workers.add()
            await workers.until_decoded(member)
            await sink.collect(1)
            await workers.end(member, kill=False)
            found.append(workers.starts[member.name])
            say(f"{name} alone: {sum(found[-1].values()):.2f} s to the first token, {found[-1]}")
    return found


def _job(name: str, length: int, chance: random.Random) -> DecodeJob:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=length)
    return new_job(RUN, name, sampling, prompt_token_ids=TokenArray(random_ids(chance, _PROMPT)))


@dataclass
class Redone:
    """Tokens that were sampled again; `most`: if each sequence had lost all that can be lost."""

    estimated: float = 0.0
    most: int = 0
    sequences: int = 0


class Feed:
    """Producer and consumer: keeps `ahead` jobs in the queue, and counts what arrives."""

    def __init__(self, broker: Broker, workers: Workers, ahead: int) -> None:
        self._queue, self._sink, self._workers = broker.queue(RUN), Sink(broker, workers, RUN), workers
        self._ahead, self._chance, self._number, self._stopped = ahead, random.Random(1), 0, False
        self.waiting = set[str]()  # job ids
        self.arrived: Counter[str] = Counter()
        self.tokens = 0
        self.redone = Redone()

    async def run(self) -> None:
        """Until cancelled."""
        await self._sink.open()
        while True:
            if not self._stopped:
                jobs = [self._new() for _ in range(self._ahead - len(self.waiting))]
                self.waiting |= {job.job_id for job in jobs}
                await enqueue(self._queue, jobs)
            for arrival in await self._sink.take():
                self._note(arrival)

    def stop(self) -> None:
        """Enqueue no more."""
        self._stopped = True

    async def is_done(self) -> bool:
        return not self.waiting

    def _new(self) -> DecodeJob:
        self._number += 1
        return _job(f"fed-{self._number}", self._chance.randint(_SHORTEST, _LONGEST), self._chance)

    def _note(self, arrival: Arrival) -> None:
        result = arrival.result()
        self.arrived[result.group_id] += 1
        self.waiting.discard(result.group_id)
        self.tokens += len(result.token_ids)
        if result.attempt > 1:
            for tokens in redone(result, parse_log(arrival.log), self._workers.gone):
                self.redone.estimated += tokens
                self.redone.most += min(_CHECKPOINT, len(result.token_ids))
                self.redone.sequences += 1


def redone(result: SequenceResult, events: Sequence[JobEvent], gone: Mapping[str, Member]) -> Iterator[float]:
    """Tokens that an ended worker had sampled of it, and that were sampled again; one number for each such attempt."""
    claims = {event.attempt: event for event in events if event.kind == "claimed"}
    tokens, seconds = len(result.token_ids), result.timings["decode_s"]
    for event in events:
        claim, member = claims.get(event.attempt), gone.get(event.worker)
        if claim is None or event.kind not in ("lost", "handed_back") or member is None or member.ending_at is None:
            continue
        if event.kind == "handed_back" and event.at < member.ending_at + _DRAIN_S / 2:
            continue  # it hadn't started
        if result.resumed_tokens:
            yield _CHECKPOINT / 2
            continue
        ended = event.at if member.killed_at is None else min(event.at, member.killed_at)
        yield min(float(_CHECKPOINT), max(0.0, ended - claim.at) / seconds * tokens if seconds else 0.0)
