"""What an update costs: three kinds in turn over the same rows, and tokens per second while updates arrive.

| kind      | what is timed                                                                                 |
|-----------|-----------------------------------------------------------------------------------------------|
| scored    | v -> v + 1: pause, load, the prefill that rebuilds the cache and scores every generated token |
| recompute | v -> v + 2: the same without scores, since no token is from the version just before           |
| none      | a decode step of the same rows                                                                |

- An update is timed from the call to the last row's first token after it; on hf rows decode meanwhile. No probe is
  scored and no digest is checked: they would hide the difference.
- Throughput: segments of all intervals alternate. Each starts with rows of evenly spread lengths, and counts tokens
  from the moment when all rows run. The longest interval gets its one update in its middle segment. An update is what a
  worker does: digest, load, probe, and the prefill that scores. An interval's rate covers all its segments.
- An update that is due while the one before is still on its way comes right after it, and a segment lasts until its
  last one serves: `steps_between` says how many steps there were for each. No update is left out.
- Rows run until they are stopped. They start with tokens decoded earlier, like a redelivered job. Times are
  `time.perf_counter` seconds, taken in the engine's thread when it reports the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import msgspec

from sluice.bench.engines import random_ids
from sluice.bench.harness import BenchPlan, play, ratios, spread, why_no_vllm
from sluice.bench.models import ENDLESS_CONTEXT
from sluice.bench.processes import cpu_s
from sluice.bench.proximal.versions import COUNT, Variants
from sluice.pipeline.config.types import BackendName
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, SluiceError
from sluice.pipeline.weights.versions import verify, write_version
from sluice.pipeline.wire.messages import Progress, SamplingParams, WeightVersion
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.weights_watch import probe_of

WAIT_S = 120.0
STEPS = {"scored": 1, "recompute": 2}
KINDS = (*STEPS, "none")
_SETTLED = 2  # steps of every row before anything is timed
_TOLERANCE = 1e-2  # nats a probe token


class Segment(NamedTuple):
    """What was decoded, and the longest time without a token of any row at each update."""

    tokens: int
    seconds: float
    gaps: list[float]  # seconds


class Plan(BenchPlan, frozen=True, kw_only=True):
    """Counts, and lengths in tokens; the same for every engine."""

    backends: str = "hf,vllm"
    rows: int = 32  # sequences running at once
    prompt: int = 64
    generated: int = 256  # of each row when the update comes, in `score_cost`
    rounds: int = 7  # of `score_cost`
    step_count: int = 16  # steps timed without an update
    longest: int = 384  # generated tokens of the longest row at the start of a segment, in `throughput`
    intervals: tuple[int, ...] = (50, 200, 1000)  # steps between updates; the last is a multiple of `segment`
    segment: int = 200  # steps
    publishes: int = 8
    retention: int = 4
    wave: int = 16  # sequences started under each version, in `valid_share`
    wave_longest: int = 128

    QUICK = {
        "rows": 4, "prompt": 16, "generated": 32, "rounds": 2, "step_count": 4, "longest": 64, "intervals": (5, 20, 40),
        "segment": 20, "publishes": 1, "wave": 4, "wave_longest": 24,
    }  # fmt: skip

    def __post_init__(self) -> None:
        if not self._asked or not set(self._asked) <= set(get_args(BackendName)):
            raise ConfigError(f"--backends {self.backends!r}: give some of {','.join(get_args(BackendName))}")
        if not self.names:
            raise ConfigError("--backends vllm: vllm is not installed (`make setup`, or the extra `vllm`)")

    @property
    def _asked(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.backends.split(",") if name.strip()))

    @property
    def why_no_vllm(self) -> str | None:
        return why_no_vllm("vllm" in self._asked)

    @property
    def names(self) -> tuple[str, ...]:
        """The backends that are measured, in this order."""
        return tuple(name for name in self._asked if name != "vllm" or not self.why_no_vllm)

    @property
    def segments(self) -> int:
        """Per interval: enough for the longest interval to get its one update."""
        return max(self.intervals) // self.segment

    @property
    def room(self) -> int:
        """New tokens left for a row that starts with `longest` generated ones."""
        return ENDLESS_CONTEXT - self.prompt - self.longest


class Sample(NamedTuple):
    """Wall and CPU seconds of an update or of one step."""

    seconds: float
    cpu_s: float


async def score_cost(backend: Backend, variants: Variants, plan: Plan) -> dict[str, Any]:
    async def one(kind: str, number: int) -> Sample:
        version, seed = backend.version, number * len(KINDS) + KINDS.index(kind)
        # on vLLM some rows run far ahead while others are prefilled
        room = ENDLESS_CONTEXT - plan.prompt - plan.generated
        async with running(backend, requests(plan, version, [plan.generated] * plan.rows, room, seed)) as rows:
            await rows.until(lambda: rows.steps() >= _SETTLED, "the rows to run")
            if kind == "none":
                begin = rows.ready + _SETTLED * rows.count
                end = begin + plan.step_count * rows.count
                await rows.until(lambda: len(rows.times) > end, "steps")
                return Sample((rows.times[end] - rows.times[begin]) / plan.step_count, 0.0)
            newer = version + STEPS[kind]
            called, used = time.perf_counter(), cpu_s()
            await backend.load_weights(variants.directory(newer), newer)
            await rows.until(lambda: rows.turned(newer), f"tokens of version {newer}")
            used, turn = cpu_s() - used, rows.turns[newer]
        _check([task.result() for task in rows.tasks], version, newer)
        return Sample(max(turn.values()) - called, used)

    return score_fields(await play(plan.rounds, KINDS, one, warm=1))


def score_fields(rounds: Sequence[Mapping[str, Sample]]) -> dict[str, Any]:
    """From rounds of a Sample of each kind; `by_cpu` compares CPU seconds over all rounds."""
    costs = ratios(rounds, "scored", "recompute", lambda sample: sample.seconds)
    cpu = {kind: sum(each[kind].cpu_s for each in rounds) for kind in STEPS}
    return {
        "vs_kv_recompute": median(costs),
        "vs_no_update": median(ratios(rounds, "scored", "none", lambda sample: sample.seconds)),
        "by_cpu": cpu["scored"] / cpu["recompute"] if cpu["recompute"] else None,
        "spread": spread(costs),
        "seconds": {kind: median(each[kind].seconds for each in rounds) for kind in KINDS},
        "rounds": len(rounds),
    }


def _check(outputs: Sequence[SequenceOutput], version: int, newer: int) -> None:
    """Raises SluiceError unless exactly the expected tokens are scored."""
    expected = newer if newer == version + 1 else -1
    for output in outputs:
        marks = output.sampled.proximal_versions or [-1] * len(output.token_ids)
        proximal = output.sampled.proximal_logprobs or output.logprobs
        wrong = [at for at, of in enumerate(output.versions) if marks[at] != (expected if of == version else -1)]
        if wrong or version not in output.versions or not all(map(math.isfinite, proximal)):
            raise SluiceError(f"{output.seq_key}: {len(wrong)} tokens are not scored as by v{version} -> v{newer}")


async def throughput(backend: Backend, variants: Variants, plan: Plan, home: Path) -> dict[str, Any]:
    versions = [write_version(variants.directory(v), home, variants.manifest(v)) for v in range(COUNT)]
    names = [*map(str, plan.intervals), "none"]
    lengths = [index * plan.longest // max(1, plan.rows - 1) for index in range(plan.rows)]

    async def one(name: str, number: int) -> Segment:
        due = due_steps(None if name == "none" else int(name), number, plan.segment)
        seed, spans = number * len(names) + names.index(name), list[tuple[int, int]]()
        async with running(backend, requests(plan, backend.version, lengths, plan.room, seed)) as rows:
            await rows.until(lambda: rows.ready > 0, "the rows to run")
            for step in due:
                await rows.until(lambda step=step: rows.steps() >= step, f"step {step}")
                begin = len(rows.times)
                await _update(backend, versions)
                spans.append((begin, len(rows.times)))
            last = max(plan.segment, math.ceil(rows.steps()))
            await rows.until(lambda: rows.steps() >= last, f"step {last}")
        tokens = last * plan.rows
        gaps = [longest_gap(rows.times, begin, end + plan.rows) for begin, end in spans]
        return Segment(tokens, rows.times[rows.ready + tokens - 1] - rows.times[rows.ready - 1], gaps)

    rounds = await play(plan.segments, names, one)
    return rate_fields({name: [each[name] for each in rounds] for name in names}, plan.rows)


def longest_gap(times: Sequence[float], begin: int, end: int) -> float:
    """Seconds without a token, from the one before index `begin` on."""
    around = times[max(0, begin - 1) : end]
    return max((after - before for before, after in pairwise(around)), default=0.0)


def rate_fields(found: Mapping[str, Sequence[Segment]], rows: int) -> dict[str, Any]:
    """Of the segments of each interval, and of `none`."""
    rates = {name: sum(one.tokens for one in each) / sum(one.seconds for one in each) for name, each in found.items()}
    updates = {name: sum(len(one.gaps) for one in each) for name, each in found.items()}
    timed = [name for name, count in updates.items() if count]
    return {
        "tok_s": rates,
        "spread": {name: spread(one.tokens / one.seconds for one in each) for name, each in found.items()},
        "updates": updates,
        "share": {name: rate / rates["none"] for name, rate in rates.items() if name != "none"},
        "steps_between": {name: sum(one.tokens for one in found[name]) / rows / updates[name] for name in timed},
        "gap_s": {name: median(gap for one in found[name] for gap in one.gaps) for name in timed},
    }


def due_steps(interval: int | None, segment: int, steps: int) -> list[int]:
    """Steps of this segment at which an update is due; `interval` divides `steps`, or is a multiple of it."""
    if interval is None:
        return []
    if interval > steps:
        per_update = interval // steps
        return [steps // 2] if segment % per_update == per_update // 2 else []
    return list(range(interval // 2, steps, interval))


async def _update(backend: Backend, versions: Sequence[WeightVersion]) -> None:
    """As workers/weights_watch.py does it."""
    number = backend.version + 1
    manifest = msgspec.structs.replace(versions[number % COUNT], version=number)
    probe = probe_of(manifest, backend.facts.dtype, _TOLERANCE)
    directory = await asyncio.to_thread(verify, manifest)
    await backend.load_weights(directory, number, probe)


def requests(plan: Plan, version: int, generated: Sequence[int], room: int, seed: int) -> list[SequenceRequest]:
    """One row per number of generated tokens, all of `version`, with `room` new tokens each. None ends early."""
    chance, found = random.Random(seed), list[SequenceRequest]()
    for index, count in enumerate(generated):
        prompt, sampling = random_ids(chance, plan.prompt), SamplingParams(temperature=1.0, max_new_tokens=count + room)
        so_far = SampledTokens(random_ids(chance, count), [0.0] * count, [version] * count)
        more: Any = {"seed": index, "so_far": so_far, "eos_token_ids": ()}
        found.append(SequenceRequest(f"{seed}:{index}", tuple(prompt), sampling, **more))
    return found


class Running:
    """Rows in an engine. `saw` runs in the engine's thread, everything else in the event loop."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.times: list[float] = []  # of each new token of any row
        self.turns: dict[int, dict[int, float]] = {}  # by version: when each row got its first token under it
        self.ready = 0  # new tokens when the last row got its first one; 0 before
        self.tasks: list[asyncio.Task[SequenceOutput]] = []
        self._started: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._holds: Callable[[], bool] | None = None
        self._held = asyncio.Event()
        self._lock = threading.Lock()  # of `_holds`

    def steps(self) -> float:
        """New tokens per row since all rows run; 0 before."""
        return (len(self.times) - self.ready) / self.count if self.ready else 0.0

    def turned(self, version: int) -> bool:
        return len(self.turns.get(version, ())) == self.count

    def saw(self, row: int, so_far: Progress) -> None:
        now, version = time.perf_counter(), so_far.versions.runs[-1][0]
        self.turns.setdefault(version, {}).setdefault(row, now)
        self.times += [now] * len(so_far.token_ids)
        self._started.add(row)
        if not self.ready and len(self._started) == self.count:
            self.ready = len(self.times)
        with self._lock:
            if self._holds is not None and self._holds():
                self._holds = None
                self._loop.call_soon_threadsafe(self._held.set)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Return once it holds; checked at every token. Raises SluiceError if a row ends, or DeadlineExceeded."""
        self._held = asyncio.Event()
        with self._lock:
            if holds():
                return
            self._holds = holds
        waiting = asyncio.create_task(self._held.wait())
        done, _ = await asyncio.wait({waiting, *self.tasks}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            raise DeadlineExceeded(f"waited {WAIT_S:.0f} s for {what}")
        for task in self.tasks:
            if task.done():
                raise SluiceError(f"a row ended before {what}: {task.result().finish_reason}")


@contextlib.asynccontextmanager
async def running(backend: Backend, asks: Sequence[SequenceRequest]) -> AsyncIterator[Running]:
    """Run all of them in the engine; they stop when the block ends."""
    rows = Running(len(asks))
    reports = [functools.partial(rows.saw, index) for index in range(len(asks))]
    watched = (replace(ask, report_every=1, report=report) for ask, report in zip(asks, reports, strict=True))
    rows.tasks = [asyncio.create_task(backend.decode(ask)) for ask in watched]
    try:
        yield rows
    finally:
        for ask in asks:
            backend.abort(ask.seq_key)
        await asyncio.wait(rows.tasks, timeout=WAIT_S)
