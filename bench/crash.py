"""A deterministic run whose processes are killed, beside one that is left alone: whether the two differ in one bit.

    rows ─┬▶ `sluice run`, undisturbed          ─▶ steps, samples, weights ─┬▶ differences
          └▶ `sluice run`, SIGKILLs over its run ─▶ steps, samples, weights ─┘

- Both are whole runs with an embedded broker, in directories of their own, with one run name: ids and seeds are equal.
- Kills are due when the run has committed so many sequences, so that they spread over all of it. Who is killed goes
  round the roles in a random order; a role whose turn it is and that isn't up is waited for.
- Rewards of the last rows wait until all kills are done: a late kill finds every role at work, the producer too.
- Every other kill of the trainer waits until it has published a version that no checkpoint holds.
- Extra tokens are those of killed attempts. How far such a sequence was when its worker died isn't known: it's
  estimated from the pace at which it was decoded again, and bounded by its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sluice.bench.harness import HOME, BenchPlan, say, until, write_rows
from sluice.bench.models import demo_model
from sluice.bench.processes import START_S, Fleet, run_settings
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import JobRow, SequenceFilter, SequenceRow
from sluice.consumers.run_files import METRICS, ROLLOUTS
from sluice.consumers.training.step_log import read_rollouts, read_steps
from sluice.pipeline.broker import connection
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import DeadlineExceeded, SluiceError
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights.versions import digest_of, newest_number
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import TrainingSample

RUN = "crash"
ROLES = ("broker", "producer", "worker", "consumer", "scorer", "trainer")
_GROUP, _BATCH, _TOKENS = 2, 8, 48
_WORKERS, _STALENESS, _CHECKPOINT_EVERY = 2, 2, 3
_STUCK_S = 240.0
_END_S = 900.0
_LOOK_S = 0.02
_HOLD = "BENCH_CRASH_HOLD"  # variable: a file with the first row that has to wait for its reward
_SHOWN, _PAGE = 10, 200
_LOSSES = ("train/loss", "policy/loss", "train/grad_norm", "policy/reward_mean")


class Plan(BenchPlan, frozen=True, kw_only=True):
    kills: int = 50
    steps: int = 30
    seed: int = 0  # of the order of the kills, and of the run

    QUICK = {"kills": 6, "steps": 6}
    BOUNDS = {"kills": (0, 1000), "steps": (3 + _STALENESS, math.inf), "seed": (0, 1 << 31)}

    @property
    def steps_held(self) -> int:
        """Before the first row that is held: the producer has a row left then, and the last version no checkpoint."""
        most = self.steps - 2 - _STALENESS
        return most - (most % _CHECKPOINT_EVERY == 0)


async def reward(text: str, truth: Any, row: dict[str, Any]) -> float:
    """What a random model's answers differ in: the share of characters that are vowels or digits."""

    async def is_free() -> bool:
        with contextlib.suppress(KeyError, FileNotFoundError):
            return row["id"] < int(Path(os.environ[_HOLD]).read_text())
        return True

    await until(is_free, "all kills", _END_S)
    return sum(character in "aeiou0123456789" for character in text) / max(1, len(text))


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`bitwise_equal`: whether both runs have the same sequences at the same steps in the same order, their tokens,
    versions, bits of behaviour and proximal logprobs, rewards, advantages, losses of every step and digest of the last
    weights (`differences`: the first few). `kills`: how many processes were killed, `kills_by_role`, and
    `kills_between`: trainers between a publication and a checkpoint. `extra_tokens_share`: tokens of killed attempts
    over the tokens of the run, estimated; `extra_tokens_share_most`: as if each had been decoded to its end.
    """
    data = home / "rows.jsonl"
    write_rows(data, (f"Say something about {number}." for number in range(plan.steps * _BATCH // _GROUP)), None)
    found: dict[str, Outcome] = {}
    kills, hold = Kills(0, []), home / "hold"
    for side in ("undisturbed", "killed"):
        config = _config(plan, home / side, data)
        started = time.monotonic()
        async with Fleet("run", _made(home / side)) as fleet:
            if side == "killed":
                hold.write_text(str(plan.steps_held * _BATCH // _GROUP))
            command = sluice_command("run", *_options(plan, home / side, data))
            await fleet.start(command, {"REDIS_URL": "", _HOLD: str(hold)})
            if side == "killed":
                kills = await Killer(plan, config, fleet).run()
                hold.unlink()
            await _ended(fleet)
        found[side] = await asyncio.to_thread(outcome, config, time.monotonic() - started)
        say(f"{side}: {len(found[side].steps)} steps in {found[side].seconds:.0f} s, {len(kills.done)} kills")
    calm, struck = found["undisturbed"], found["killed"]
    differences = differing(calm, struck)
    for each in differences:
        say(f"differs: {each}")
    again = await asyncio.to_thread(extra_tokens, _config(plan, home / "killed", data), kills.done)
    return {
        "bitwise_equal": not differences,
        "differences": differences,
        "kills": len(kills.done),
        "kills_by_role": {role: sum(kill.role == role for kill in kills.done) for role in ROLES},
        "kills_between": kills.between,
        "extra_tokens_share": again.estimated / calm.tokens,
        "extra_tokens_share_most": again.most / calm.tokens,
        "tokens": calm.tokens,
        "sequences": calm.sequences,
        "weights_sha256": calm.weights,
        "undisturbed_s": calm.seconds,
        "killed_s": struck.seconds,
        "aims": {"bitwise_equal": {"aim": "true at 50 kills", "found": not differences, "met": not differences}},
    }


def _settings(plan: Plan, home: Path, data: Path) -> list[str]:
    return run_settings(
        RUN, demo_model(HOME), f"run_dir={home / 'runs'}", f"broker.embedded_dir={home / 'broker'}",
        f"seed={plan.seed}",
        f"data.path={data}", "deterministic=true", "model.device=cpu", "dashboard.enabled=false",
        f"worker.count={_WORKERS}", "worker.max_batch=1", "worker.checkpoint_tokens=0", "worker.max_attempts=1000",
        "worker.lease_s=4", "worker.renew_s=1", "scorer.lease_s=2", "scorer.pass_tokens=1",
        f"producer.group_size={_GROUP}", f"producer.samples_per_version={_BATCH}",
        f"producer.max_staleness={_STALENESS}", f"sampling.max_new_tokens={_TOKENS}",
        "policy.enabled=true", "rollout_matching.reward=sluice.bench.crash:reward", "trainer.keep_rollouts=null",
        f"rollout_matching.reward_timeout_s={_END_S}", "rollout_matching.reward_concurrency=64",
        "trainer.learning_rate=0.001", f"trainer.checkpoint_every={_CHECKPOINT_EVERY}",
        f"weights.retention={_STALENESS + _CHECKPOINT_EVERY + 1}",
        "up.max_restarts=1000", "up.restart_backoff_s=0.1", "up.restart_backoff_max_s=0.2", "preflight.max_s=0",
    )  # fmt: skip


def _options(plan: Plan, home: Path, data: Path) -> list[str]:
    return [part for value in _settings(plan, home, data) for part in ("--set", value)]


def _config(plan: Plan, home: Path, data: Path) -> Config:
    return load_config(None, _settings(plan, home, data), environ={})


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


async def _ended(fleet: Fleet) -> None:
    """Raises SluiceError unless the run ends well."""
    async with asyncio.timeout(_END_S):
        code = await fleet.processes[0].wait()
    if code:
        fleet.check()


@dataclass(frozen=True)
class Kill:
    """A SIGKILL; `at` is Unix time."""

    role: str
    name: str
    at: float


@dataclass
class Kills:
    """`between`: trainers with a version that no checkpoint held."""

    between: int
    done: list[Kill]


class Killer:
    """Kills processes of a run while it works."""

    def __init__(self, plan: Plan, config: Config, fleet: Fleet) -> None:
        self._plan, self._config, self._fleet = plan, config, fleet
        self._dice = random.Random(plan.seed)
        self._kills = Kills(0, [])
        self._dead = set[int]()
        self._counts = Counter[str]()
        self._moved = time.monotonic()

    async def run(self) -> Kills:
        """All kills of the plan. Raises DeadlineExceeded where the run doesn't move, SluiceError where it ends."""
        last = (self._plan.steps_held + 1 + _STALENESS) * _BATCH  # committed while rows are held
        async with _broker(self._config) as client:
            keys, committed = Keys(RUN), -1
            while len(self._kills.done) < self._plan.kills:
                now = await snapshot(client, keys)
                if now.committed != committed:
                    committed, self._moved = now.committed, time.monotonic()
                due = (len(self._kills.done) + 0.5) * last / (self._plan.kills + 1)
                if committed >= due:
                    await self._strike(now)
                self._check()
                await asyncio.sleep(_LOOK_S)
        return self._kills

    def _check(self) -> None:
        self._fleet.check()
        if time.monotonic() - self._moved > _STUCK_S:
            done = len(self._kills.done)
            raise DeadlineExceeded(f"after {done} kills nothing was decoded or killed for {_STUCK_S:.0f} s")

    async def _strike(self, now: Snapshot) -> None:
        """Kill one process of a role that was killed least, if one is up."""
        up, least = self._up(now), min(self._counts[role] for role in ROLES)
        due = sorted(role for role in up if self._counts[role] == least)
        if not due:
            return
        role = "producer" if "producer" in due else self._dice.choice(due)  # it ends before the others
        name, pid = self._dice.choice(up[role])
        if role == "trainer" and self._counts[role] % 2 == 0:
            await self._wait_between()
        is_between = role == "trainer" and self._is_between()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self._dead.add(pid)
            return
        self._kills.done.append(Kill(role, name, time.time()))
        self._kills.between += is_between
        self._counts[role] += 1
        self._dead.add(pid)
        self._moved = time.monotonic()
        say(f"kill {len(self._kills.done)}: {name} at {now.committed} sequences" + (", between" if is_between else ""))

    def _up(self, now: Snapshot) -> dict[str, list[tuple[str, int]]]:
        """(name, pid) by role, of processes that can be killed."""
        found: dict[str, list[tuple[str, int]]] = {}
        for role in ROLES[1:]:
            rows = [(row.name, row.pid) for row in now.alive(role) if row.pid not in self._dead and _is_up(row.pid)]
            if rows:
                found[role] = rows
        card = _card(self._config)
        if card is not None and card[1] not in self._dead:
            found["broker"] = [("broker", card[1])]
        return found

    def _is_between(self) -> bool:
        run_dir = Path(self._config.run_dir) / RUN
        saved = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")]
        return newest_number(run_dir / "weights") > max(saved, default=0)

    async def _wait_between(self) -> None:
        with contextlib.suppress(DeadlineExceeded):
            what, check = "a version without a checkpoint", self._fleet.check
            await until(self._has_gap, what, _STUCK_S, every_s=_LOOK_S, check=check)

    async def _has_gap(self) -> bool:
        return self._is_between()


def _card(config: Config) -> tuple[str, int] | None:
    """URL and process id of the run's embedded broker; None before it has some."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((Path(config.broker.embedded_dir) / "broker.json").read_text())
        return str(found["url"]), int(found["pid"])
    return None


def _is_up(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@contextlib.asynccontextmanager
async def _broker(config: Config) -> AsyncGenerator[Any]:
    """The run's embedded broker, once it answers; it comes back under its URL."""

    async def has_card() -> bool:
        return _card(config) is not None

    await until(has_card, "the run's broker", START_S, every_s=_LOOK_S)
    url, _ = _card(config) or ("", 0)
    client = connection.connect(msgspec.structs.replace(config.broker, url=url), RUN)
    try:
        yield client
    finally:
        await client.aclose()


@dataclass(frozen=True)
class Outcome:
    """What a run left behind; nothing of it depends on time."""

    seconds: float
    steps: Sequence[Mapping[str, Any]]  # by step: losses, then its samples in order
    weights: str  # sha256 of the last version's files
    tokens: int  # sampled
    sequences: int


def outcome(config: Config, seconds: float) -> Outcome:
    """Raises SluiceError if steps or samples are missing."""
    run_dir = Path(config.run_dir) / RUN
    losses = {int(line["step"]): line for line in read_steps(run_dir / METRICS)}
    batches = dict(read_rollouts(run_dir / ROLLOUTS))
    if losses.keys() != batches.keys() or sorted(losses) != list(range(1, len(losses) + 1)):
        raise SluiceError(f"{run_dir}: metrics of {len(losses)} steps, samples of {len(batches)}")
    steps = [
        {
            **{name: losses[step].get(name) for name in _LOSSES},
            "samples": [_bits(sample) for sample in batches[step].samples],
        }
        for step in sorted(batches)
    ]
    samples = [sample for batch in batches.values() for sample in batch.samples]
    weights = run_dir / "weights" / f"v{newest_number(run_dir / 'weights'):06d}"
    return Outcome(seconds, steps, f"{weights.name} {digest_of(weights)}", sum(map(_sampled, samples)), len(samples))


def _bits(sample: TrainingSample) -> dict[str, Any]:
    """What must be equal; floats as their bits."""
    floats = {
        "logprobs": sample.logprobs,
        "proximal_logprobs": sample.proximal_logprobs,
        "reward": [] if sample.reward is None else [sample.reward],
        "advantage": [] if sample.advantage is None else [sample.advantage],
    }
    return {
        "seq_id": sample.seq_id,
        "token_ids": list(sample.token_ids),
        "versions": sample.versions.expand(),
        "proximal_versions": sample.proximal_versions.expand(),
        "response_mask": sample.response_mask.expand(),
        **{name: np.array(values, dtype=np.float64).tobytes().hex() for name, values in floats.items()},
    }


def _sampled(sample: TrainingSample) -> int:
    return sum(version >= 0 for version in sample.versions.expand())


def differing(one: Outcome, other: Outcome) -> list[str]:
    """The first few things that differ; empty if nothing does."""
    return list(islice(_differences(one, other), _SHOWN))


def _differences(one: Outcome, other: Outcome) -> Iterator[str]:
    if len(one.steps) != len(other.steps):
        yield f"{len(one.steps)} steps and {len(other.steps)}"
    if one.weights != other.weights:
        yield f"weights {one.weights} and {other.weights}"
    for step, (left, right) in enumerate(zip(one.steps, other.steps, strict=False), 1):
        for name in _LOSSES:
            if left[name] != right[name]:
                yield f"step {step}: {name} {left[name]!r} and {right[name]!r}"
        if len(left["samples"]) != len(right["samples"]):
            yield f"step {step}: {len(left['samples'])} samples and {len(right['samples'])}"
        for mine, theirs in zip(left["samples"], right["samples"], strict=False):
            for name in mine:
                if mine[name] != theirs[name]:
                    yield f"step {step}: {name} of {mine['seq_id']}"


@dataclass
class Extra:
    """Tokens that were decoded and thrown away."""

    estimated: float = 0.0
    most: int = 0


def extra_tokens(config: Config, kills: Sequence[Kill]) -> Extra:
    """From the run's history: of each failed attempt of a job, the sequence that it was decoding."""
    found = Extra()
    with contextlib.closing(HistoryReader(history_directory(config))) as reader:
        for job in _retried(reader):
            rows = reader.sequences(SequenceFilter(job_id=job.job_id), limit=max(1, job.group_size)).rows
            for attempt, began, ended in _failed(job, kills):
                _add(found, sorted(rows, key=lambda row: row.index), attempt, began, ended)
    return found


def _retried(reader: HistoryReader) -> Iterator[JobRow]:
    before, more = "", True
    while more:
        page = reader.jobs(limit=_PAGE, before=before)
        yield from (whole for row in page.rows if row.attempts > 1 and (whole := reader.job(row.job_id)) is not None)
        before, more = page.next, bool(page.next)


def _failed(job: JobRow, kills: Sequence[Kill]) -> Iterator[tuple[int, float, float]]:
    """Attempts that ended without the job: number, when it began, when it could decode no more."""
    began = {event.attempt: event for event in job.events if event.kind == "claimed"}
    for event in job.events:
        claim = began.get(event.attempt)
        if claim is None or event.kind not in ("lost", "handed_back"):
            continue
        deaths = [kill.at for kill in kills if kill.name == event.worker and claim.at <= kill.at <= event.at]
        if deaths or event.kind == "lost":  # else it was handed back before it began: its version wasn't there yet
            yield event.attempt, claim.at, min(deaths, default=event.at)


def _add(found: Extra, rows: Sequence[SequenceRow], attempt: int, began: float, ended: float) -> None:
    """One row at a time, in the order of their indices: it was decoding the first that a later attempt committed."""
    redone = next((row for row in rows if row.attempt > attempt), None)
    if redone is None or redone.decode_s <= 0:
        return
    done = [row.enqueued_at + row.queue_s + row.decode_s for row in rows if row.attempt == attempt]
    for_s = max(0.0, ended - max([began, *done]))
    if for_s > 0:
        found.estimated += min(redone.new_tokens, for_s / redone.decode_s * redone.new_tokens)
        found.most += redone.new_tokens
