"""The trainer's side of a run: takes batches, finishes steps, makes them durable, acks them, publishes versions.

    batches ──▶ take ──▶ drop ──▶ step ──▶ commit: save ──▶ version's files ──▶ ack ──▶ register ──▶ workers
                 (some of them)  in memory        durable from here on
                                     ├───▶ publish: version's files ──▶ register, without a commit
                                     └───▶ begin_commit … end_commit: save ──▶ ack, while later steps are made

A version's files may be written in the background (`begin_publish`). It has its number at once, and a kill before it is
registered is one that undoes it; nothing names it durably before it is there.

| waits for            | unblocked by                                              |
|----------------------|-----------------------------------------------------------|
| batches, in `take`   | consumers; the end of the run; `trainer.batch_wait_s`     |
|                      | since the last batch or group that was filtered           |
| images, in `take`    | the disk, image servers; `trainer.batch_wait_s`           |
| a version's files    | the disk; `weights.publish_timeout_s`                     |
| the broker           | the broker; `broker.retry_for_s`                          |

Each sample is trained or dropped exactly once, wherever the process is killed:

| killed                                 | the next start                                                       |
|----------------------------------------|----------------------------------------------------------------------|
| before the steps are durable           | cuts their log lines; their batches come again                       |
| before the version's files are written | writes them from the same weights, under the same number             |
| before the ack                         | acks what the state lists; a batch acked twice is counted once       |
| before the version is registered       | registers it                                                         |
| after a version without a commit       | leaves it at once for that of the last commit; the steps since then  |
|                                        | come again, and the same weights get the same number, others a new   |
|                                        | one                                                                  |

A step's batches take up no credit, though they stay unacked until a commit.

In a deterministic run a batch names its step: `take` returns those in turn, whatever their order in the stream, and a
version's number is that of its step, or the run ends.

A sample whose images can't be used (gone, changed, undecodable) is dropped as it is taken. Images that can't be
reached drop nothing: at the deadline `take` raises, and the batch comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace
from safetensors import SafetensorError

from sluice.consumers.samples import HAS_IMAGES, blind, letter
from sluice.consumers.training.checkpoint import TrainerState, remove_unfinished_states
from sluice.consumers.training.images import IMAGE_FAILED, SampleImages
from sluice.consumers.training.step_log import StepRecords
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.scripts.streams import Stepped
from sluice.pipeline.broker.streams import Entry, Ownership, ack_batches, batch_reader
from sluice.pipeline.errors import (
    ConfigError,
    DeadlineExceeded,
    MessageError,
    ModelError,
    TaskError,
    WeightsError,
    first_cause,
)
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.trained import begin_again, recognise
from sluice.pipeline.run.role import Role
from sluice.pipeline.status.evaluation import best_of, evaluation_of
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.status.text import wait_text
from sluice.pipeline.telemetry import training_metrics
from sluice.pipeline.telemetry.spans import step_ref, step_spans, version_spans
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.carriers import carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.codec import integer_or
from sluice.pipeline.wire.messages import (
    REFERENCE_DIRECTORY,
    DeadLetter,
    Shard,
    TrainingBatch,
    TrainingSample,
    WeightVersion,
    decode,
)
from sluice.pipeline.wire.tokens import TokenArray
from sluice.pipeline.wire.trace import Carrier
from sluice.pipeline.wire.waits import Wait, WaitKind

T = TypeVar("T")
P = ParamSpec("P")
_READ = 8  # entries per call
_FILTERED = "dropped:zero_variance"
_OF_FILES = (OSError, SafetensorError, ModelError, WeightsError)  # what work with files that are gone raises


@dataclass(frozen=True)
class Weights:
    """A model directory that becomes a version, and the probe that workers check it against; score None: no probe."""

    directory: Path
    probe: Sequence[int] = ()
    score: float | None = None
    may_return: bool = True  # a kill may have undone them before; False: their files are what makes them durable
    shards: Mapping[str, Shard] = field(default_factory=dict[str, Shard])  # of `directory`, if whoever wrote it knows
    dtype: str = ""  # as in a manifest


# Writes the files of a version, in a thread, within what is given; their directory is deleted once they are published.
Make = Callable[[versions.Ahead | None], Weights]
Fence = Callable[[], None]  # raises LeaseLost if the trainer was replaced; for a thread
# Makes a state durable, with the fence right before its rename.
Save = Callable[[TrainerState, Fence], object]


@dataclass(eq=False)
class Taken:
    """A batch as read from the stream."""

    entry_id: str
    num_samples: int
    num_bytes: int  # in the broker
    fresh: list[TrainingSample]  # neither trained nor dropped so far
    repeats: frozenset[str] = frozenset()  # ids that an earlier batch has brought, and that weren't finished then
    letters: list[DeadLetter] = field(default_factory=list)  # for the dropped ones

    @property
    def handed_at(self) -> float:
        """Unix time of the broker when a consumer handed it over: the entry's id says it."""
        return integer_or(self.entry_id.partition("-")[0], 0) / 1000

    def without(self, seq_ids: Collection[str]) -> Taken:
        """A copy with fewer fresh samples."""
        fresh = [sample for sample in self.fresh if sample.seq_id not in seq_ids]
        return Taken(self.entry_id, self.num_samples, self.num_bytes, fresh, self.repeats, list(self.letters))


class _InTurn(msgspec.Struct):
    """Of a TrainingBatch."""

    step: int | None = None


def _alone(
    change: Callable[Concatenate[Session, P], Awaitable[T]],
) -> Callable[Concatenate[Session, P], Awaitable[T]]:
    """For methods that replace the state, and wait in between."""

    @wraps(change)
    async def changed(session: Session, *args: P.args, **kwargs: P.kwargs) -> T:
        async with session.changing:
            return await change(session, *args, **kwargs)

    return changed


class Session:
    """Valid while this process owns the run's trainer role. One event loop, and one caller but for `end_commit`."""

    def __init__(
        self,
        role: Role,
        owner: Ownership,
        trackers: Trackers,
        seen: Iterable[str] = (),
        images: SampleImages | None = None,
        *,
        probe_is_exact: bool = True,
    ) -> None:
        """`seen`: ids that the caller's own checkpoint holds; they aren't returned, and count as trained.

        `images`: open; None if the model takes none, and samples with images are dropped. `probe_is_exact`: whether
        workers may compare the change of the probe's score from one version to the next.
        """
        self._role, self._owner, self._seen, self._images = role, owner, frozenset(seen), images
        self._probe_is_exact = probe_is_exact
        self._config = role.config
        self.run_dir = Path(role.config.run_dir) / role.config.run
        self.root = self.run_dir / "weights"
        self._carrier = carrier_of(role.config, role.status.fact)
        self._reader = batch_reader(role.client, role.keys, role.name, owner)
        self._registry = WeightsRegistry(role.client, role.keys)
        self._records = StepRecords(role, trackers, self.run_dir)
        self._unread: deque[Entry] = deque()
        self._next: list[Taken] = []  # taken, but not enough yet to return
        self._given: list[Taken] = []  # returned, and not finished: some of it isn't part of a step yet
        self._given_at = time.monotonic()
        self._published: tuple[int, float | None] | None = None  # newest version of this process, its probe's score
        self._publish_s: float | None = None  # checkpoint and publication of that version
        self._publishing: asyncio.Task[None] | None = (
            None  # of the state's version, which the registry may not know yet
        )
        self._stepped_bytes: dict[str, int] = {}  # of unacked batches, by entry id
        self._durable_version = 0
        self._saving_version: int | None = None  # between `begin_commit` and `end_commit`
        self.changing = asyncio.Lock()
        self._committed = True  # False: a step, or the rest of a commit that failed behind the ack, waits for `commit`
        self.state = TrainerState()  # of the steps in memory

    async def claim_files(self) -> None:
        """Remove what a predecessor is still writing; before reading what to continue from.

        It checks its claim right before it renames. If it is paused in between until another trainer has started, there
        is nothing left to rename.
        """
        await self._owner.confirm()
        await asyncio.to_thread(remove_unfinished_states, self.run_dir)

    async def open(self, state: TrainerState, weights: Weights | None) -> None:
        """Continue from a durable state; first finishes what an earlier process left half done.

        `weights`: those of the state; None if only the directory of its version is left.
        """
        client, keys = self._role.client, self._role.keys
        self._role.status.waiting(WaitKind.VERSIONS)
        self.state = state
        if not await recognise(client, keys, self.run_dir):
            await begin_again(client, keys, self.run_dir, state.version, f"step {state.step}")
        latest = await self._registry.latest()
        if latest and not state.version and versions.newest_number(self.root) < 0:
            raise WeightsError(
                f"version {latest} is registered, but {self.root} has none; share the run's directory with this host"
            )
        if weights is not None and not state.is_published:
            # They may have become a version after their checkpoint; if their version is gone, they become one now.
            number = await self._number_of(weights)
            if number is None and not self._version_directory().is_dir():
                number = await self._registry.next_number(state.version, self.root)
            if number is not None:
                state.publish(number)
        if weights is None or not state.is_published:
            directory = self._version_directory()
            there = await asyncio.to_thread(versions.read_manifest, directory)
            # A kill may have come between the directory and the store.
            weights, manifest = None, await self._writing(self._carrier.publish, directory, there, self._fence())
        else:
            manifest = await self._write_version(weights, state)
        self._durable_version = state.version
        await self._ack()
        await self._register(manifest, weights)
        if state.version_step is None:  # of an older release, or the first
            state.version_step = manifest.step
        await self._keep_reference()
        await self._owner.confirm()
        await asyncio.to_thread(self._records.resume, state.step, state.recent)
        self._unread.extend(await self._reader.open())
        self._role.status.waiting(None)

    async def take(self) -> list[TrainingSample]:
        """`producer.samples_per_version` samples; fewer at the end of the run, none when it is over or at a stop."""
        return [] if await self._gets_no_better() else await self._take()

    async def _take(self) -> list[TrainingSample]:
        wanted, limit_s = self._config.producer.samples_per_version, self._config.trainer.batch_wait_s
        until, dry, filtered = time.monotonic() + limit_s, False, -1
        if not self.given and any(each.letters for each in self._given):
            await self._end_dropped(self._given)
            self._given = []
        while self._lacks(wanted) and not self._role.stop.is_set():
            entry, read = self._in_turn(), list[Entry]()
            if entry is None:
                self._role.status.waiting(WaitKind.BATCHES, count=len(self.given) or None)
                now = await self._snapshot()  # first: anything handed off before this is read below
                dry = _is_dry(now)
                if now.stepped != self._stepped().samples:  # the broker lost its last second
                    await self._ack_pairs([], {})
                if now.reasons.get(_FILTERED, 0) != filtered:  # others are on their way in its place
                    until, filtered = time.monotonic() + limit_s, now.reasons.get(_FILTERED, 0)
                read = await self._reader.read(_READ, block_ms=1 if dry else 200)
                self._unread.extend(read)
                entry = self._in_turn()
            if entry is not None:
                if not await self._open(entry):
                    break
                self._unread.remove(entry)  # only now: a batch that cannot be read is an error again, not forgotten
                until = time.monotonic() + limit_s
            elif dry and self._unread and not read:
                raise MessageError(f"{self._role.keys.batches} has no batch of step {self.state.step}, and later ones")
            elif dry and not read:
                break
            elif time.monotonic() > until:
                raise DeadlineExceeded(self._overdue(limit_s))
        self._role.status.waiting(None)
        if self._role.stop.is_set():
            return []
        taken, self._next = self._next, []
        self._given_at = self._given_at if self._given else time.monotonic()
        self._given += taken
        return [sample for each in taken for sample in each.fresh]

    def _lacks(self, wanted: int) -> bool:
        """Whether what is taken isn't enough yet to return."""
        if self._config.deterministic:
            return not any(each.fresh for each in self._next)
        # What is dropped counts too: it holds credit, so waiting for others in its place might never end.
        return sum(len(each.fresh) + len(each.letters) for each in self._next) < wanted

    def _in_turn(self) -> Entry | None:
        """What to take next of what was read; None if that hasn't come yet."""
        if not self._config.deterministic:
            return self._unread[0] if self._unread else None
        return next((entry for entry in self._unread if _step_of(entry) <= self.state.step), None)

    async def _gets_no_better(self) -> bool:
        """Whether the evaluations end the run: `eval.patience`."""
        patience = self._config.eval.patience
        if patience is None:
            return False
        now = await evaluation_of(self._role.client, self._role.keys)
        if now.best is None or now.since_best < patience:
            return False
        get_logger().warning("no more batches", cause=now.stops, best=now.best)
        return True

    def drop(self, letters: Mapping[str, DeadLetter]) -> None:
        """Don't train these, by sequence id; the ack counts each with its letter, and they are never returned again.

        Raises TaskError for one that wasn't returned, or is finished.
        """
        unknown = sorted(letters.keys() - {sample.seq_id for each in self._given for sample in each.fresh})
        if unknown:
            raise TaskError(f"{unknown[0]}: not dropped: it was not delivered, or is finished")
        for each in self._given:
            dropped = {sample.seq_id for sample in each.fresh} & letters.keys()
            each.letters += [letters[seq_id] for seq_id in sorted(dropped | (each.repeats & letters.keys()))]
            each.fresh = each.without(letters).fresh
        self.state.remember_dropped(letters.values())
        self._forget_images(letters)

    @_alone
    async def step(
        self,
        record: Mapping[str, float],
        samples: Sequence[TrainingSample] | None = None,
        *,
        finishes: Collection[str] | None = None,
        empty: bool = False,
    ) -> bool:
        """Make the returned samples one step of the weights, which waits for `commit`.

        `samples`: as trained, if that differs from what was returned. `finishes`: of what was returned, only these ids;
        the rest stays as it is. A batch is acked with the last of its samples.

        False if nothing is left to train, so there is no step; what was dropped is acked at once. With `empty` it's a
        step all the same. A retry, of which every sample is part of a step already, makes no other one.
        """
        chosen = {sample.seq_id for sample in self.given}
        if finishes is not None:
            chosen &= set(finishes)
        whole, rest = self._split(chosen)
        if not chosen and not whole and (finishes or not self._committed):
            return True
        if samples is None:
            samples = [sample for sample in self.given if sample.seq_id in chosen]
        letters = [each for taken in whole for each in taken.letters]
        after = replace(self.state, step=self.state.step + 1)
        await self._owner.confirm()
        if not samples and not empty:
            await self._end_dropped(whole)
            self._given = rest
            return False
        _take(after, whole)
        after.samples += len(samples)
        after.tokens += sum(len(sample.token_ids) for sample in samples)
        after.remember([sample.seq_id for sample in samples])
        values = training_metrics.reduce([sample.metrics for sample in samples])
        values |= {"train/step_s": time.monotonic() - self._given_at, **record}
        if self._publish_s is not None:
            values["train/publish_s"] = self._publish_s
        values |= after.count(values)
        await self._writing(self._records.write, after.step, after.version, samples, values, self._fence())
        handed_at = {one.seq_id: each.handed_at for each in self._given for one in each.fresh}
        self._records.note(after.step, after.version, samples, letters, handed_at)
        await self._records.show(after.step, values)
        self._trace_step(after, samples, values, handed_at)
        self._forget_images(chosen)
        self.state, self._given, self._committed = after, rest, False
        self._given_at = time.monotonic()
        await self._free_credit(whole)
        self._show()
        return True

    def _trace_step(
        self,
        after: TrainerState,
        samples: Sequence[TrainingSample],
        values: Mapping[str, float],
        handed_at: Mapping[str, float],
    ) -> None:
        role = self._role
        if role.tracing.enabled:
            place = (role.config.run, after.step, after.version)
            role.tracing.send(step_spans(*place, samples, values, handed_at, role.name, time.time()))

    def _step_trace(self, step: int) -> Carrier:
        return step_ref(self._config.run, step).carrier() if self._role.tracing.enabled else {}

    def _trace_version(self, manifest: WeightVersion) -> None:
        name, now = self._role.name, self._role.status.broker_time()
        self._role.tracing.send(version_spans("publish", manifest, name, manifest.published_at, now))

    def _split(self, finished: Collection[str]) -> tuple[list[Taken], list[Taken]]:
        """The given batches of which nothing is left once these ids are finished, and the rest of the others."""
        left = [one.without(finished) for one in self._given]
        unfinished = {sample.seq_id for one in (*left, *self._next) for sample in one.fresh}
        whole = [one for one in left if not one.fresh and one.repeats.isdisjoint(unfinished)]
        return whole, [one for one in left if one not in whole]

    async def _end_dropped(self, taken: Sequence[Taken]) -> None:
        """All that these batches gave is dropped: there's no step, and nobody waits for one to free their credit."""
        if not taken:
            return
        letters = [each for one in taken for each in one.letters]
        if letters:
            get_logger().warning("all samples of a step were dropped; no update", batches=len(taken))
        self._records.note(self.state.step + 1, self.state.version, [], letters)
        if self.uncommitted:  # one of them may repeat what a kill would undo
            _take(self.state, taken)
            await self._free_credit(taken)
        else:
            await self._ack_taken(taken)

    @_alone
    async def commit(self, save: Save, weights: Weights | None = None, *, make: Make | None = None) -> None:
        """Make the steps since the last commit durable with `save`, and ack their batches.

        `weights`: those of the state; they become the next version, whose number is in the state that `save` gets.
        `make`: the same, as `begin_publish` takes it; the checkpoint comes first.
        """
        started = time.monotonic()
        await self.published()
        await self._owner.confirm()
        state = replace(self.state)
        if weights:
            state.publish(await self._number_for(weights))
        elif make:
            number, make = await self._numbered(make)
            state.publish(number)
        await self._writing(save, state, self._fence())
        manifest = await self._write_version(weights, state) if weights else None
        self.state, self._durable_version = state, state.version
        await asyncio.to_thread(self._records.known.durable, state.step)
        await self._ack()
        if manifest is not None:
            await self._register(manifest, weights)
            self._publish_s = time.monotonic() - started
        elif make is not None:
            self._begin(make, started)
        self._committed = True
        self._show()

    def begin_commit(self) -> TrainerState:
        """A copy of the state, for `end_commit` once; its version is kept until then."""
        self._saving_version = self.state.version
        return replace(self.state)

    async def end_commit(self, state: TrainerState, save: Save) -> None:
        """Make a copy of an earlier state durable with `save`, and ack its batches; steps may follow meanwhile."""
        await self._writing(save, state, self._fence())
        await self._ack_behind(state)

    @_alone
    async def _ack_behind(self, state: TrainerState) -> None:
        self._durable_version, self._saving_version = state.version, None
        await asyncio.to_thread(self._records.known.durable, state.step)
        await self._ack_all_of(state)
        while self.state.unacked and self.state.step == state.step:
            # Batches that were dropped whole since the copy made no step: there is nothing more to commit.
            await self._ack_all_of(replace(self.state))
        self._committed = self.state.step == state.step

    async def _ack_all_of(self, state: TrainerState) -> None:
        """Ack what this copy holds, and no more, though batches are taken meanwhile."""
        pairs, drops = list(state.unacked), dict(state.unacked_drops)
        await self._ack_pairs(pairs, drops)
        acked = {entry_id for entry_id, _ in pairs}
        self.state.unacked = [one for one in self.state.unacked if one[0] not in acked]
        left = self.state.unacked_drops.items()
        self.state.unacked_drops = {entry_id: letters for entry_id, letters in left if entry_id not in acked}

    @_alone
    async def publish(self, weights: Weights) -> None:
        """Make the weights of the steps so far the next version, though a kill undoes those since the last commit."""
        started = time.monotonic()
        await self.published()
        await self._owner.confirm()
        state = replace(self.state)
        state.publish(await self._number_for(weights))
        manifest = await self._write_version(weights, state)
        self.state = state
        await self._register(manifest, weights)
        self._publish_s = time.monotonic() - started
        self._show()

    @_alone
    async def begin_publish(self, make: Make) -> None:
        """The same, but returns once the version has its number; a task of the role writes and registers it.

        Whatever prevents that ends the role. Before the next version or checkpoint, and at the end, `published` waits.
        """
        started = time.monotonic()
        await self.published()
        await self._owner.confirm()
        state = replace(self.state)
        number, make = await self._numbered(make)
        state.publish(number)
        self.state = state
        self._begin(make, started)
        self._show()

    async def published(self) -> None:
        """Wait until the version that is written in the background is registered.

        Raises what prevented it; DeadlineExceeded after `weights.publish_timeout_s`.
        """
        if self._publishing is None:
            return
        limit_s, number = self._config.weights.publish_timeout_s, self.state.version
        if not self._publishing.done():
            self._role.status.waiting(WaitKind.PUBLICATION, f"v{number}")
            done, _ = await asyncio.wait([self._publishing], timeout=limit_s)
            if not done:
                raise DeadlineExceeded(
                    f"version {number} was not written within {limit_s:.0f} s; is the disk of {self.root} slow or not "
                    "mounted? Raise weights.publish_timeout_s if writing takes longer"
                )
            self._role.status.waiting(None)
        await self._publishing
        self._publishing = None

    def _begin(self, make: Make, started: float) -> None:
        self._publishing = self._role.spawn(self._publish_made(make, self.state, started))

    async def _publish_made(self, make: Make, state: TrainerState, started: float) -> None:
        weights = await self._writing(make, self._carrier.ahead(state.line.parent))
        made = time.monotonic()
        try:
            manifest = await self._write_version(weights, state)
        finally:
            await asyncio.to_thread(shutil.rmtree, weights.directory, ignore_errors=True)
        spent = {"files_s": round(made - started, 3), "durable_s": round(time.monotonic() - made, 3)}
        get_logger().info("written beside the training", version=manifest.version, **spent)
        await self._register(manifest, weights)
        self._publish_s = time.monotonic() - started

    async def _numbered(self, make: Make) -> tuple[int, Make]:
        """The version's number, and what makes it: only where a kill undid the same step do its weights decide."""
        step, parent = self.state.step, self.state.version
        if not await asyncio.to_thread(versions.twins, self.root, step=step, parent=parent):
            return await self._next_number(), make
        weights = await self._writing(make, None)
        return await self._number_for(weights), lambda _: weights

    @contextlib.asynccontextmanager
    async def guarding_files(self) -> AsyncIterator[None]:
        """If the trainer was replaced and its successor deleted its files, raise exactly that, not what is missing."""
        try:
            yield
        except Exception as error:
            if isinstance(first_cause(error), _OF_FILES):
                await self._owner.confirm()
            raise

    async def check_owner(self) -> None:
        """Raises LeaseLost if the trainer was replaced."""
        await self._owner.confirm()

    async def close(self) -> None:
        """Write the last version and the last lines."""
        await self.published()
        await self._records.close()

    @property
    def given(self) -> list[TrainingSample]:
        """What was returned, and is neither part of a step nor dropped."""
        return [sample for each in self._given for sample in each.fresh]

    @property
    def uncommitted(self) -> bool:
        """Whether there are steps that are not durable and acked."""
        return bool(self.state.unacked) or not self._committed

    @property
    def holds_much(self) -> bool:
        """Whether steps without a commit hold so much in the broker that they should get one."""
        return self._stepped().bytes > self._config.producer.max_in_flight_mb << 19

    def _stepped(self, acked: Collection[str] = ()) -> Stepped:
        """What is in steps without an ack, once these entries are acked."""
        left = [(entry_id, samples) for entry_id, samples in self.state.unacked if entry_id not in acked]
        num_bytes = sum(self._stepped_bytes.get(entry_id, 0) for entry_id, _ in left)
        return Stepped(sum(samples for _, samples in left), num_bytes)

    async def complete(self) -> bool:
        """Whether nothing is left to train."""
        return (await self._snapshot()).complete

    async def nothing_follows(self) -> bool:
        """Whether the steps since the last commit are the last of the run."""
        if self._unread or self._next or not _is_dry(await self._snapshot()):
            return False
        return await self._reader.depth() == len(self.state.unacked)

    def _show(self) -> None:
        self._role.status.fact(step=self.state.step, version=self.state.version, samples=self.state.samples)

    async def _snapshot(self) -> Snapshot:
        return await snapshot(self._role.client, self._role.keys)

    def _cause(self) -> str:
        """What `take` is waiting for."""
        return wait_text(Wait(kind=WaitKind.BATCHES, count=len(self.given) or None))

    def _overdue(self, waited_s: float) -> str:
        if self.given:
            return f"{waited_s:.0f} s without {self._cause()}"
        return f"no training batch for {waited_s:.0f} s: are workers and consumers alive? See `sluice status`"

    async def _open(self, entry: Entry) -> bool:
        """False if asked to stop meanwhile."""
        try:
            batch = decode(TrainingBatch, entry.fields[b"b"])
        except (MessageError, KeyError) as error:
            # Only our consumer writes here: losing samples silently is worse than stopping.
            raise MessageError(f"{self._role.keys.batches} {entry.entry_id}: {error}") from error
        ids, dropped = {sample.seq_id for sample in batch.samples}, self.state.dropped
        in_hand = {sample.seq_id for each in (*self._next, *self._given) for sample in each.fresh} & ids
        finished = self._records.known.known(ids)
        if seen := sorted((self._seen & ids) - finished - in_hand - dropped.keys()):
            await self._writing(self._records.adopt, self.state.step, seen)
            self.state.remember(seen)
        known = finished | set(seen) | in_hand
        new = [sample for sample in batch.samples if sample.seq_id not in known and sample.seq_id not in dropped]
        again = [letter(one, dropped[one], "dropped by the trainer before") for one in sorted(ids & dropped.keys())]
        if batch.step is not None and batch.step < self.state.step and new:  # a broker that lost its data asks for all
            detail = f"step {batch.step} was trained without it"
            again, new = again + [letter(sample.seq_id, "stale", detail) for sample in new], []
        unseen = await self._without_images(new)
        if unseen is None:
            return False
        fresh = [sample for sample in new if sample.seq_id not in unseen]
        if before := sorted(finished):  # handed on twice, or another sequence under an id that isn't its own
            get_logger().warning(
                "trained before; not again", batch=batch.batch_id, samples=len(before), first=before[0]
            )
        self.state.remember_dropped(unseen.values())
        self._records.note(self.state.step + 1, self.state.version, [], list(unseen.values()))
        taken = Taken(
            entry.entry_id,
            len(batch.samples),
            len(entry.fields[b"b"]),
            fresh,
            frozenset(in_hand),
            again + list(unseen.values()),
        )
        if fresh or in_hand:  # a repeat is acked with the original
            self._next.append(taken)
        elif known and self.uncommitted:  # it may repeat something that a kill would undo
            _take(self.state, [taken])
            await self._free_credit([taken])
        else:
            await self._ack_taken([taken])  # the broker lost the first count along with the ack
        return True

    async def _without_images(self, samples: Sequence[TrainingSample]) -> dict[str, DeadLetter] | None:
        """Letters of the samples whose images can't be trained on, by `seq_id`; None if asked to stop meanwhile."""
        seen = [sample for sample in samples if sample.images]
        if self._images is None or not seen:
            return {one.seq_id: letter(one.seq_id, HAS_IMAGES, blind(len(one.images))) for one in seen}
        self._role.status.waiting(WaitKind.IMAGES, count=len(seen))
        found = await self._role.unless_stopped(self._images.take(seen, self._config.trainer.batch_wait_s))
        self._role.status.waiting(None)
        if found is None:
            return None
        failed = {seq_id: letter(seq_id, IMAGE_FAILED, why) for seq_id, why in found.items()}
        for each in failed.values():
            get_logger().warning("dropped", sequence=each.seq_id, reason=each.reason, detail=each.detail)
        return failed

    def _forget_images(self, seq_ids: Iterable[str]) -> None:
        if self._images is not None:
            self._images.forget(seq_ids)

    def _version_directory(self) -> Path:
        return self.root / f"v{self.state.version:06d}"

    async def _number_for(self, weights: Weights) -> int:
        """That of the version with which a kill undid the same step, if these are its weights again; else a new one."""
        number = await self._number_of(weights)
        return await self._next_number() if number is None else self._in_step(number)

    async def _next_number(self) -> int:
        return self._in_step(await self._registry.next_number(self.state.version, self.root))

    def _in_step(self, number: int) -> int:
        step = self.state.step
        if self._config.deterministic and number != step:
            raise WeightsError(
                f"step {step} would be version {number}: a kill undid a version {step} with other weights, so this run "
                "isn't deterministic; is something in it (a reward, a task, a library) random or a different release?"
            )
        return number

    async def _number_of(self, weights: Weights) -> int | None:
        """The version that was published from this state with these weights; None if there is none."""
        if not weights.may_return:
            return None
        step, parent = self.state.step, self.state.version
        return await asyncio.to_thread(versions.same_again, self.root, weights.directory, step=step, parent=parent)

    async def _write_version(self, weights: Weights, state: TrainerState) -> WeightVersion:
        previous, before = self._published or (None, None)
        manifest = WeightVersion(
            version=state.version,
            path="",
            digest="",
            probe_token_ids=TokenArray(weights.probe),
            probe_score=weights.score,
            previous=previous,
            previous_score=before if self._probe_is_exact else None,
            parent=state.line.parent,
            branch=state.branch,
            step=state.step,
            trace=self._step_trace(state.step),
            published_at=self._role.status.broker_time(),
            shards=dict(weights.shards),
            dtype=weights.dtype,
        )
        return await self._writing(self._carrier.publish, weights.directory, manifest, self._fence())

    async def _register(self, manifest: WeightVersion, weights: Weights | None) -> None:
        latest, retention = await self._registry.latest(), self._config.weights.retention
        newest = self.state.line.newest_few(retention)
        # A kill takes the run back to the last commit, whose version may be all that is left of its weights.
        # What the evaluator holds it named before a version that could retire it came: see Evaluator._due.
        held = (await evaluation_of(self._role.client, self._role.keys)).held
        best = await asyncio.to_thread(best_of, self.run_dir)
        others = (self._saving_version, self._reference, best)
        kept = {*newest, self._durable_version, *held, *(one for one in others if one is not None)}
        gone = await asyncio.to_thread(versions.retired, self.root, kept, manifest.version)
        if spare := retention - len(newest):  # for live ones that the line is too short to remember
            older = [number for number in gone if number < newest[0]][-spare:]
            gone = [number for number in gone if number not in older]
        if self._config.deterministic:  # sequences wait for one version, and a broker may have lost it
            for number in newest[:-1]:
                if await self._registry.get(number) is None and (self.root / f"v{number:06d}").is_dir():
                    await self._put_back(number)
        await self._registry.register(manifest, self._owner.key, self._owner.nonce, gone)
        await asyncio.to_thread(self._carrier.remove, gone)
        if latest is not None and latest > manifest.version:
            get_logger().warning("back to an older version", version=manifest.version, lost_up_to=latest)
        self._trace_version(manifest)
        get_logger().info("published", version=manifest.version, digest=manifest.digest[:12])
        self._published = (manifest.version, weights.score) if weights else None

    @property
    def _reference(self) -> int | None:
        return self._config.policy.reference

    async def _keep_reference(self) -> None:
        """Scorers find the reference in the registry: another broker doesn't know it, nor one that lost its data."""
        number = self._reference
        if number is None or number == REFERENCE_DIRECTORY or self._config.trainer.external:
            return
        directory = self.root / f"v{number:06d}"
        if not directory.is_dir():
            raise ConfigError(
                f"policy.kl_reference {number}: {self.root} has no version {number}; a version is kept for it from the "
                "start that names it, so name one that is still there, or start a run of another name (--set run=NAME) "
                "from the weights that should be the reference"
            )
        await self._put_back(number)  # always: the run's directory may have moved since it was registered

    async def _put_back(self, number: int) -> None:
        directory = self.root / f"v{number:06d}"
        manifest = replace(await asyncio.to_thread(versions.read_manifest, directory), path=str(directory))
        await self._registry.put_back(manifest, self._owner.key, self._owner.nonce)

    def _fence(self) -> Fence:
        loop = asyncio.get_running_loop()
        return lambda: asyncio.run_coroutine_threadsafe(self._owner.confirm(), loop).result()

    async def _writing(self, write: Callable[..., T], *args: Any) -> T:
        async with self.guarding_files():
            return await asyncio.to_thread(write, *args)

    async def _ack(self) -> None:
        state = self.state
        await self._ack_pairs(state.unacked, state.unacked_drops)
        state.unacked, state.unacked_drops = [], {}

    async def _free_credit(self, taken: Sequence[Taken]) -> None:
        """These wait for a commit, and for nothing else."""
        self._stepped_bytes |= {each.entry_id: each.num_bytes for each in taken}
        await self._ack_pairs([], {})

    async def _ack_taken(self, taken: Sequence[Taken]) -> None:
        pairs = [(each.entry_id, each.num_samples) for each in taken]
        await self._ack_pairs(pairs, {each.entry_id: each.letters for each in taken})

    async def _ack_pairs(self, pairs: list[tuple[str, int]], drops: Mapping[str, Sequence[DeadLetter]]) -> None:
        await self._records.flush()
        scripts, keys, owner = self._role.scripts, self._role.keys, self._owner
        acked = {entry_id for entry_id, _ in pairs}
        await ack_batches(scripts, keys, owner.key, owner.nonce, pairs, drops, self._stepped(acked))
        for entry_id in acked:
            self._stepped_bytes.pop(entry_id, None)
        self._reader.release([entry_id for entry_id, _ in pairs])


def _is_dry(now: Snapshot) -> bool:
    """Whether everything that the source has was handed on, or ended before."""
    return now.exhausted and now.accepted + now.dead + now.dropped >= now.enqueued


def _step_of(entry: Entry) -> int:
    """-1 if unknown: whoever opens it says what is wrong with it."""
    with contextlib.suppress(msgspec.MsgspecError, KeyError):
        step = msgspec.msgpack.decode(entry.fields[b"b"], type=_InTurn).step
        return -1 if step is None else step
    return -1


def _take(state: TrainerState, taken: Sequence[Taken]) -> None:
    """They are part of the state, and acked with it."""
    state.take([(each.entry_id, each.num_samples, each.letters) for each in taken])
