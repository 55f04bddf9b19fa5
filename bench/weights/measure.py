"""The benchmark's plan, and its parts one after the other, for one backend after the other.

| part    | what runs                                                                                                 |
|---------|-----------------------------------------------------------------------------------------------------------|
| shares  | Adam steps; each version as a delta of the one before it                                                  |
| trips   | nothing beside them: from the optimiser's step to a version that is swapped in and proven, by carrier,    |
|         | each in turn with a plain write and read, and with a plain copy through shared memory                     |
| beside  | the trainer goes on and sequences run: where the time of a version goes, and what the trainer loses       |
| join    | the newest version, on a host that has nothing of it                                                      |
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, get_args

import torch

from sluice.bench.broker import Broker, enqueue, new_job, own_broker
from sluice.bench.engines import random_ids
from sluice.bench.harness import BenchPlan, aim, play, say, until, why_no_vllm
from sluice.bench.processes import START_S, Fleet, engine_environment
from sluice.bench.weights.lines import CARRIERS, DELTAS, Follower, Line, Published
from sluice.bench.weights.training import LEARNING_RATE, Training
from sluice.bench.weights.worker import Arrived, serve
from sluice.consumers.training.snapshot import Snapshot
from sluice.pipeline.config.types import BackendName
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.weights import delta
from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams
from sluice.pipeline.wire.tokens import TokenArray

_WARM = 10  # Adam steps before anything is measured
_PROMPT = 64  # tokens
_LONG = 900  # tokens of a sequence that runs beside
_JOBS_A_ROW = 64
_ALONE = 2  # steps of the trainer that are timed without a publication
_BESIDE = ("directory", "engine", "delta-500")
_JOINED = ("directory", "engine", "store", "delta-500")
_DISK, _COPY = "write and read", "cast and copy"  # what carriers are compared with
_BLOCK = 4 << 20
AIMS = {"directory": 1.5, "engine": 1.2, "delta-500": 0.3}


class Plan(BenchPlan, frozen=True, kw_only=True):
    """The model's size, and how much is measured."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "layers": 2, "hidden": 128, "vocab": 512, "steps": 3, "rounds": 2, "beside": 1, "rows": 2,
    }  # fmt: skip
    BOUNDS: ClassVar[Mapping[str, tuple[int, float]]] = {"vocab": (512, math.inf), "hidden": (128, math.inf)}

    backends: str = "hf,vllm"
    layers: int
    hidden: int
    vocab: int
    steps: int
    rounds: int
    beside: int = 3
    rows: int = 8
    threads: int

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


class Trip(NamedTuple):
    """A version's way, or what it is compared with: then `arrived` is None."""

    seconds: float  # from the optimiser's step to swapped and proven
    published: Published | None = None
    arrived: Arrived | None = None
    stalled_s: float = 0.0
    slowed_s: float = 0.0  # of a step of the trainer beside it


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`delta_share`: compressed ÷ whole bfloat16 bytes. By backend: `vs_copy` by carrier, `trip_s`, `copy_s` (what
    carriers are compared with), `to_first_token_s` split, `publish_s`, `stall_s`, `step_slowdown_s`, `late_join_s`.
    `bytes` of a version by carrier. `aims`: of the worse backend."""
    torch.set_num_threads(plan.threads)
    training = await asyncio.to_thread(
        Training, home / "model", layers=plan.layers, hidden=plan.hidden, vocab=plan.vocab
    )
    parameters = sum(value.numel() for value in training.model.parameters())
    say(f"{parameters / 1e6:.0f} M parameters")
    shares = await asyncio.to_thread(_shares, training, home / "steps", plan.steps)
    say(f"delta_share {median(shares):.4f}")
    found: dict[str, dict[str, Any]] = {}
    async with own_broker(home / "broker") as broker:
        for name in plan.names:
            found[name] = await _of_backend(name, plan, home, training, broker)
    return {
        "parameters": parameters,
        "learning_rate": LEARNING_RATE,
        "delta_share": median(shares),
        "delta_shares": shares,
        **{key: {name: each[key] for name, each in found.items()} for key in next(iter(found.values()))},
        "aims": aims(median(shares), found),
    }


def aims(share: float, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each target, and whether the worse backend meets it."""
    stalls = [each["stall_s"][name] / each["publish_s"][name] for each in found.values() for name in _BESIDE]
    worst = {name: max(each["vs_copy"][name] for each in found.values()) for name in AIMS}
    return {
        "delta_share": aim("<=", 0.05, share),
        "stall_s / publish_s": aim("<=", 0.05, max(stalls)),
        **{f"vs_copy.{name}": aim("<=", AIMS[name], value) for name, value in worst.items()},
    }


def _shares(training: Training, home: Path, count: int) -> list[float]:
    """Of each version's delta from the one before it, in the whole file's bytes."""
    for _ in range(_WARM):
        training.step()
    found, before = list[float](), home / "before"
    for number in range(count + 1):
        after = home / str(number)
        after.mkdir(parents=True)
        training.snapshot().write(training.source, after)
        if number:
            old, new = (each / "model.safetensors" for each in (before, after))
            found.append(delta.encode(old, new, home / "delta").size / new.stat().st_size)
            shutil.rmtree(before)
        before = after
        training.step()
    shutil.rmtree(home)
    return found


async def _of_backend(name: str, plan: Plan, home: Path, training: Training, broker: Broker) -> dict[str, Any]:
    env = engine_environment(plan.threads)
    arguments = [name, str(training.source), plan.rows, plan.threads]
    with contextlib.ExitStack() as scope:
        lines = {one: Line(one, name, home, training, broker, plan.rows) for one in CARRIERS}
        for line in lines.values():
            scope.callback(line.close)
            await line.owner.confirm()
        async with Fleet.of_children(f"engine-{name}", home, serve, arguments, env=env) as fleet:
            follower = Follower(fleet)
            trips, sizes = await _trips(plan, home, training, lines, follower)
            beside = {one: await _beside(plan, training, lines[one], follower, broker) for one in _BESIDE}
            joined = {one: await follower.join(lines[one]) for one in _JOINED}
    whole = sizes["directory"]
    return {**_trip_fields(trips, whole), "bytes": sizes, **_beside_fields(beside, trips), "late_join_s": joined}


async def _trips(
    plan: Plan, home: Path, training: Training, lines: Mapping[str, Line], follower: Follower
) -> tuple[list[dict[str, Trip]], dict[str, int]]:
    """Rounds of all carriers and of what they are compared with; bytes by carrier."""
    plain = _Plain(training, home)
    stepped = -2
    sizes: dict[str, int] = {}

    async def one(side: str, number: int) -> Trip:
        nonlocal stepped
        if number != stepped:  # one step a round, which all its sides publish
            await asyncio.to_thread(training.step)
            stepped = number
        if side in (_DISK, _COPY):
            return Trip(await asyncio.to_thread(plain.disk if side == _DISK else plain.memory))
        line = lines[side]
        if line.version < 0:  # an anchor, which nobody times
            await line.publish(training.snapshot(), 0.0)
            async with follower.following(line, held=False):
                return Trip(0.0)
        async with follower.following(line):
            crossed, began = line.store.crossed if line.store else 0, time.monotonic()
            published = await line.publish(training.snapshot(), began)
            sizes[side] = line.store.crossed - crossed if line.store else plain.size
            arrived = await follower.arrival(published.version)
        trip = Trip(arrived.loaded - began, published, arrived)
        say(f"{side}: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in _parts(trip).items()))
        return trip

    with contextlib.closing(plain):
        sides = (_DISK, "directory", "delta-500", _COPY, "engine", "delta-100", "store", "delta-2000")
        return await play(plan.rounds, sides, one, warm=1, show=lambda trip: f"{trip.seconds:.2f} s"), sizes


class _Plain:
    """What carriers are compared with, over the same weights: in files as large as theirs, and in warm memory."""

    def __init__(self, training: Training, home: Path) -> None:
        self._live = [value.detach() for value in training.model.parameters()]
        self._file, self._memory = home / "plain", MEMORY / f"{home.name}-plain"
        self._copy = [torch.empty_like(value, dtype=torch.bfloat16) for value in self._live]
        self.size = sum(value.nbytes for value in self._copy)
        with self._memory.open("wb+") as file:
            file.truncate(self.size)
            self._mapped = mmap.mmap(file.fileno(), self.size)
        shared = torch.frombuffer(self._mapped, dtype=torch.bfloat16)
        self._shared = [
            part.view_as(value)
            for part, value in zip(shared.split([one.numel() for one in self._live]), self._live, strict=True)
        ]
        for own, shown in zip(self._copy, self._shared, strict=True):  # warm
            own.zero_()
            shown.zero_()

    def disk(self) -> float:
        """Write, fdatasync and read of the bfloat16 bytes, which are ready in memory."""
        for own, live in zip(self._copy, self._live, strict=True):
            own.copy_(live)
        self._file.unlink(missing_ok=True)
        began, into = time.monotonic(), memoryview(bytearray(_BLOCK))
        with self._file.open("wb+", buffering=0) as file:
            for block in self._blocks():
                file.write(block)
            os.fdatasync(file.fileno())
            file.seek(0)
            while file.readinto(into):
                pass
        return time.monotonic() - began

    def memory(self) -> float:
        """A cast into warm shared memory, and a copy out of it."""
        began = time.monotonic()
        for shown, live in zip(self._shared, self._live, strict=True):
            shown.copy_(live)
        for own, shown in zip(self._copy, self._shared, strict=True):
            own.copy_(shown)
        return time.monotonic() - began

    def close(self) -> None:
        self._memory.unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _blocks(self) -> Iterator[memoryview]:
        for own in self._copy:
            raw = memoryview(own.view(-1).view(torch.uint8).numpy().data)
            for at in range(0, len(raw), _BLOCK):
                yield raw[at : at + _BLOCK]


async def _beside(plan: Plan, training: Training, line: Line, follower: Follower, broker: Broker) -> list[Trip]:
    """Versions while the trainer goes on and sequences run."""
    found: list[Trip] = []
    async with follower.following(line):
        await enqueue(broker.queue(line.run), _long_jobs(line.run, plan))

        async def all_run() -> bool:
            return any(row.get("running", 0) >= plan.rows for row in await broker.serving(line.run))

        await until(all_run, "the sequences to run", START_S, check=follower.check)
        for _ in range(plan.beside):
            alone = [await asyncio.to_thread(training.step) for _ in range(_ALONE)]
            snapshot, began = training.snapshot(), time.monotonic()
            way = asyncio.create_task(_way(line, follower, snapshot, began))
            stalled, slow = 0.0, list[float]()
            while not way.done():
                slow.append(await asyncio.to_thread(training.step, snapshot.copy))
                stalled += training.stalled_s
            published, arrived = await way
            say(f"{line.run}, beside: {arrived.first - began:.2f} s, the trainer waited {stalled:.3f} s")
            found.append(
                Trip(
                    arrived.loaded - began, published, arrived, stalled, (median(slow) if slow else 0.0) - median(alone)
                )
            )
    return found


async def _way(line: Line, follower: Follower, snapshot: Snapshot, began: float) -> tuple[Published, Arrived]:
    published = await line.publish(snapshot, began)
    return published, await follower.arrival(published.version)


def _long_jobs(run: str, plan: Plan) -> list[DecodeJob]:
    """More than are decoded meanwhile."""
    chance, sampling = random.Random(0), SamplingParams(temperature=1.0, max_new_tokens=_LONG)
    prompts = [TokenArray(random_ids(chance, _PROMPT)) for _ in range(plan.rows * _JOBS_A_ROW)]
    return [new_job(run, str(at), sampling, prompt_token_ids=ids) for at, ids in enumerate(prompts)]


def _trip_fields(rounds: Sequence[Mapping[str, Trip]], size: int) -> dict[str, Any]:
    def compared(found: Mapping[str, Trip], name: str) -> float:
        if name in DELTAS:
            return size / (DELTAS[name] * 1e6 / 8)
        return found[_COPY if name == "engine" else _DISK].seconds

    return {
        "vs_copy": {name: median(one[name].seconds / compared(one, name) for one in rounds) for name in CARRIERS},
        "trip_s": {name: _split([one[name] for one in rounds]) for name in CARRIERS},
        "copy_s": {name: median(compared(one, name) for one in rounds) for name in CARRIERS},
    }


def _split(trips: Sequence[Trip]) -> dict[str, float]:
    """Medians of the parts; without running sequences there is nothing to prefill."""
    parts = [_parts(each) for each in trips]
    return {name: median(each[name] for each in parts) for name in parts[0]}


def _parts(trip: Trip) -> dict[str, float]:
    published, arrived = trip.published, trip.arrived
    assert published is not None
    assert arrived is not None
    return {
        "snapshot": published.copied - published.began,
        "write": published.registered - published.copied,
        "notice": arrived.noticed - published.registered,
        "fetch": arrived.fetched - arrived.noticed,
        "load": arrived.loaded - arrived.fetched,
        "all": arrived.loaded - published.began,
    }


def _beside_fields(found: Mapping[str, Sequence[Trip]], rounds: Sequence[Mapping[str, Trip]]) -> dict[str, Any]:
    """Files of `store` and `delta` are verified as they are read, the others are mapped and read as they are verified:
    one of the two is 0. `prefill`: what a load takes longer than one without sequences and training beside it."""
    first: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for name, trips in found.items():
        split, idle = _split(trips), _split([one[name] for one in rounds])
        is_fetched = name in DELTAS or name == "store"
        load = min(split["load"], idle["load"])
        tokens = [each.arrived.first - each.arrived.loaded for each in trips if each.arrived is not None]
        first[name] = {
            **{part: split[part] for part in ("snapshot", "write", "notice")},
            "read": split["fetch"] if is_fetched else 0.0,
            "verify": 0.0 if is_fetched else split["fetch"],
            "load": load,
            "prefill": split["load"] - load,
            "token": median(tokens),
            "all": median(
                each.arrived.first - each.published.began for each in trips if each.arrived and each.published
            ),
        }
        published = [each.published.registered - each.published.began for each in trips if each.published]
        beside[name] = {
            "publish_s": median(published),
            "stall_s": median(each.stalled_s for each in trips),
            "step_slowdown_s": median(each.slowed_s for each in trips),
        }
    parts = ("publish_s", "stall_s", "step_slowdown_s")
    return {
        "to_first_token_s": first,
        **{part: {name: each[part] for name, each in beside.items()} for part in parts},
    }
