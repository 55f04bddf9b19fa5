"""The consumer: results → groups → samples → batches.

    results:{partition} ─▶ Assembler ─▶ rewards ─▶ parse · match · target ─▶ pending samples ─▶ hand_off ─▶ batches

| waits for                | unblocked by                     |
|--------------------------|----------------------------------|
| results                  | workers, or the end of rollouts  |
| the rest of a group      | workers, or a tombstone          |
| reward functions         | the functions, or their deadline |
| a full batch             | more results, or the end of the source |

- One process per results partition. It claims the first free one, or stands by until one is free.
- Every step up to hand_off is repeatable; hand_off is one Lua call, fenced by the partition's owner.
- Groups are scored by the reward functions side by side: a slow one holds up neither the others nor the reading.
- A dropped group returns its credit at once, not with the next batch.
- In a deterministic run a batch is that of one optimiser step, in the order of its rows, whenever they arrived. What is
  dropped stays unacked until then: a successor must know that the step doesn't lack it.
- Finished sequences are written to the history before they are handed off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from sluice.consumers.groups import Assembler, Group, Steps
from sluice.consumers.history.recorder import FinishedJob, Recorder
from sluice.consumers.pack import pack_rows
from sluice.consumers.rewards import Refused, Reward, Rewards
from sluice.consumers.samples import Sampler, image_token_of, letter
from sluice.consumers.tasks.registry import open_task
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.broker.connection import is_cluster
from sluice.pipeline.broker.streams import Entry, Ownership, hand_off, result_reader
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DataError, MessageError, ResultsLost
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import step_row_of
from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.telemetry import training_metrics
from sluice.pipeline.telemetry.spans import Span, Waterfall, batch_ref, root_of
from sluice.pipeline.wire.codec import integer
from sluice.pipeline.wire.keys import ARQ_RESULT, run_of
from sluice.pipeline.wire.messages import MAX_GROUP, DeadLetter, SequenceResult, TrainingBatch, TrainingSample, decode
from sluice.pipeline.wire.trace import Carrier, SpanRef
from sluice.pipeline.wire.waits import WaitKind

_READ = 128


_SCORED_S = 0.2  # how long scored groups are waited for before the stream is read again


class _Scored(NamedTuple):
    """A whole group, with what the reward functions said of its members by sequence id."""

    group: Group
    rewards: Mapping[str, Reward | Refused] = {}


class _Made(NamedTuple):
    """The outcome of one group."""

    group: Group
    samples: list[TrainingSample]
    letters: list[DeadLetter]
    finished: list[FinishedJob]  # for the history
    at: float  # Unix time when it was made
    spans: Waterfall | None  # None: it isn't traced


class Consumer:
    """Owns one results partition."""

    def __init__(
        self,
        role: Role,
        partition: int,
        owner: Ownership,
        task: Task,
        context: TaskContext,
        rewards: Rewards | None = None,
    ) -> None:
        """`rewards` is closed with the consumer."""
        self._role, self._owner, self._rewards = role, owner, rewards
        self._sampler = Sampler(task, context, role.config.consumer, image_token_of(role.config.model))
        self._reader = result_reader(role.client, role.keys, partition, role.name, owner)
        self._groups = Assembler()
        self._history = Recorder(role.config, partition)
        self._sizes: dict[str, int] = {}  # bytes of each entry held
        self._samples: list[TrainingSample] = []
        self._entry_ids: list[str] = []
        self._letters: list[DeadLetter] = []
        self._traced: list[_Made] = []  # of the next batch
        self._batch_size = role.config.producer.samples_per_version // role.config.consumer.count
        self._steps = Steps[_Made]() if role.config.deterministic else None
        self._scoring: dict[asyncio.Task[_Scored], int] = {}  # to the number of sequences
        self._handed = self._failures = 0

    async def run(self) -> None:
        """Consume until asked to stop or the run is over."""
        try:
            await self._consume()
        finally:
            await self._stop_scoring()
            if self._rewards:
                self._rewards.close()
            await self._history.close()

    async def _consume(self) -> None:
        await self._take(await self._reader.open())
        while not self._role.stop.is_set():
            try:
                entries = await self._reader.read(_READ, block_ms=1 if self._scoring else 200)
                await self._take(entries)
                if self._scoring:
                    await self._take_scored(0 if entries else _SCORED_S)
                elif not entries and await self._at_the_end():
                    return
            except ResultsLost as error:
                get_logger().warning("starting over", cause=str(error))
                await self._stop_scoring()
                self._start_anew()
                await self._take(await self._reader.open())

    def _start_anew(self) -> None:
        self._reader.forget()
        self._history.forget()
        self._groups, self._sizes = Assembler(), {}
        self._steps = None if self._steps is None else Steps()
        self._samples, self._entry_ids, self._letters, self._traced = [], [], [], []

    async def _take(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._role.status.waiting(None)
        groups: list[Group] = []
        for entry in entries:
            self._sizes[entry.entry_id] = entry.num_bytes
            group = await self._assemble(entry)
            if group is not None:
                groups.append(group)
        if self._rewards:
            for group in groups:
                asked = [result for result in group.living if self._sampler.is_scored(result)]
                self._scoring[asyncio.create_task(self._score(group, asked, self._rewards))] = len(asked)
        elif groups:
            await self._finish_groups([_Scored(group) for group in groups])
        self._report()

    async def _score(self, group: Group, asked: Sequence[SequenceResult], rewards: Rewards) -> _Scored:
        found = await asyncio.gather(*(rewards.of(result) for result in asked))
        for one in found:
            if isinstance(one, Reward):
                self._role.telemetry.observe(group.living[0].trace, sluice_reward_seconds=one.seconds)
            else:
                self._failures += 1
        return _Scored(group, {result.seq_id: one for result, one in zip(asked, found, strict=True)})

    async def _take_scored(self, wait_s: float) -> None:
        """Finish the groups that are scored by now, or are the first within `wait_s`."""
        await asyncio.wait(self._scoring, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._scoring if task.done()]  # in the order in which they were read
        for task in done:
            del self._scoring[task]
        if done:
            await self._finish_groups([task.result() for task in done])
        self._report()

    async def _stop_scoring(self) -> None:
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        self._scoring.clear()

    async def _finish_groups(self, scored: Sequence[_Scored]) -> None:
        # In a thread: a slow task must not keep this process from renewing its ownership.
        for made in await asyncio.to_thread(self._made_of, scored):
            self._history.keep(made.finished)
            if self._steps is not None:
                await self._finish_in_step(self._steps, made)
                continue
            await self._finish_group(made)
            if len(self._samples) >= self._batch_size:
                await self._hand_off_batch()

    async def _finish_in_step(self, steps: Steps[_Made], made: _Made) -> None:
        group_id = made.group.group_id
        place = step_row_of(group_id) if run_of(group_id) == self._role.config.run else None
        if place is None or steps.holds(place):
            detail = "it has no place in a step: a deterministic run trains what its producer enqueued"
            others = [letter(sample.seq_id, "no_step", detail) for sample in made.samples]
            await self._drop(made, made.letters + others)
        elif (whole := steps.add(place, made)) is not None:
            await self._hand_off_step(place.step, whole)

    async def _hand_off_step(self, step: int, whole: Sequence[_Made]) -> None:
        """The batch of one optimiser step, in the order of its rows; what was dropped leaves with it."""
        for made in whole:
            self._samples += made.samples
            self._entry_ids += made.group.entry_ids
            self._letters += made.letters
            self._traced.append(made)
        if not self._samples:
            why = next((f": {one.seq_id} {one.reason}, {one.detail}" for one in self._letters), "")
            raise DataError(f"step {step} of a deterministic run has nothing to train{why}")
        await self._hand_off_batch(step)

    def _made_of(self, scored: Sequence[_Scored]) -> list[_Made]:
        made: list[_Made] = []
        for group, rewards in scored:
            samples, letters = self._sampler.samples_of(group, rewards)
            spans = self._spans_of(group, samples, letters)
            finished = self._history.encoded(group, samples, letters)
            made.append(_Made(group, samples, letters, finished, time.time(), spans))
        return made

    def _spans_of(
        self, group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]
    ) -> Waterfall | None:
        role, now = self._role, time.time()
        if not role.tracing.enabled:
            return None
        given = next((member.trace for member in group.living if member.trace), {})
        events = parse_log(self._history.log_of(group.group_id))
        spans = Waterfall(
            group.group_id,
            given or root_of(group.group_id, role.tracing.ratio).carrier(),
            events,
            model=Path(role.config.model.path).name,
        )
        if not spans.ref.sampled:
            return None
        made, ended = {one.seq_id: one for one in samples}, {one.seq_id: one.reason for one in letters}
        for member in group.living:
            at, sample = group.committed_at(member), made.get(member.seq_id)
            spans.decoded(member, at)
            spans.consumed(
                member.seq_id,
                at,
                now,
                role.name,
                reward_s=0.0 if sample is None else sample.metrics.get("rollout/reward_s", 0.0),
                reward=None if sample is None else sample.reward,
                error=ended.get(member.seq_id, ""),
            )
        return spans

    async def _assemble(self, entry: Entry) -> Group | None:
        fields = entry.fields
        try:
            group_id, size = fields[b"g"].decode(), integer(fields.get(b"n"), "n", least=1, most=MAX_GROUP)
            index = integer(fields.get(b"i"), "i", most=size - 1)
            parts = integer(fields.get(b"m", b"1"), "m", least=1, most=MAX_GROUP)
            part = integer(fields.get(b"k", b"0"), "k", most=parts - 1)
        except (KeyError, ValueError, MessageError) as error:
            await self._discard(entry, error)
            return None
        self._history.log(group_id, fields.get(b"l", b""))
        try:
            if b"r" in fields:
                result = decode(SequenceResult, fields[b"r"])
                found = (result.group_id, result.group_size, result.index, result.part, result.parts)
                if found != (group_id, size, index, part, parts):
                    raise MessageError(f"it belongs to another place: {found}, in the entry of {group_id}:{index}")
                return self._groups.add_result(entry.entry_id, result)
            return self._groups.add_dead(entry.entry_id, group_id, size, index, decode(DeadLetter, fields[b"d"]))
        except (MessageError, KeyError) as error:
            if not await self._is_known(group_id):
                await self._discard(entry, error)
                return None
            name = f"{group_id}:{index}" + (f"/{part}" if part else "")
            problem = letter(name, "malformed_result", str(error))
            return self._groups.add_unreadable(entry.entry_id, group_id, size, (index, part), parts, problem)

    async def _is_known(self, group_id: str) -> bool:
        """Whether the broker knows a job or an open rollout with this id."""
        if run_of(group_id) == self._role.config.run:
            return True
        names = [self._role.keys.job_state, self._role.keys.rollout]
        if not is_cluster(self._role.client):  # on a cluster we can't look up such an id's result
            names.append(ARQ_RESULT)
        return bool(await self._role.client.exists(*(f"{name}{group_id}" for name in names)))

    async def _discard(self, entry: Entry, problem: Exception) -> None:
        """Ack an entry that no worker of this run wrote: it belongs to no sequence, so it isn't counted as a drop."""
        where = f"{self._reader.stream} {entry.entry_id}"
        get_logger().error("not a result; discarded", entry=where, error=str(problem))
        self._sizes[entry.entry_id] = 0  # it never counted against the credit
        await self._out(TrainingBatch(batch_id=_batch_id([entry.entry_id]), samples=[]), [entry.entry_id], [])

    async def _finish_group(self, made: _Made) -> None:
        if made.samples:
            # The group's drops are handed off with its samples: a consumer killed in between would record them twice.
            self._samples += made.samples
            self._entry_ids += made.group.entry_ids
            self._letters += made.letters
            self._traced.append(made)
        else:
            await self._drop(made, made.letters)

    async def _hand_off_batch(self, step: int | None = None) -> None:
        lengths = [len(sample.token_ids) for sample in self._samples]
        batch = TrainingBatch(
            batch_id=_batch_id(self._entry_ids),
            samples=self._samples,
            rows=pack_rows(lengths, self._role.config.consumer.row_tokens),
            metrics=training_metrics.reduce([sample.metrics for sample in self._samples]),
            step=step,
            trace=self._batch_trace(_batch_id(self._entry_ids)),
        )
        await self._out(batch, self._entry_ids, self._letters)
        self._export(self._traced, batch)
        self._handed += len(self._samples)
        self._role.telemetry.observe(sluice_hand_off_samples=len(self._samples))
        self._samples, self._entry_ids, self._letters, self._traced = [], [], [], []

    def _batch_trace(self, batch_id: str) -> Carrier:
        return batch_ref(self._role.config.run, batch_id).carrier() if self._role.tracing.enabled else {}

    def _export(self, traced: Sequence[_Made], batch: TrainingBatch | None = None) -> None:
        """The spans of groups that were handed off, or dropped; and of their batch, linked to their answers."""
        role, now = self._role, time.time()
        ref = None if batch is None else SpanRef.read(batch.trace)
        links: list[SpanRef] = []
        for made in traced:
            if (spans := made.spans) is None:
                continue
            first = min((one.timings.get("enqueued_at", 0.0) for one in made.group.living), default=0.0) or made.at
            if ref is not None:
                spans.handed(made.at, now, role.name, ref)
            died = [one for one in made.group.members.values() if isinstance(one, DeadLetter)] or made.letters
            spans.whole(
                first,
                now if ref is not None else made.at,
                error=died[0].reason if died else "",
                attributes={"sluice.group_size": made.group.size, "sluice.samples": len(made.samples)},
            )
            role.tracing.send(spans.spans)
            links += spans.answers
        if ref is not None and batch is not None and links:
            about = {"sluice.batch": batch.batch_id, "sluice.samples": len(batch.samples)}
            start = min(made.at for made in traced)
            more: dict[str, Any] = {"kind": "producer", "role": "consumer", "process": role.name, "attributes": about}
            role.tracing.send([Span(stage="batch", ref=ref, start=start, end=now, links=links, **more)])

    async def _drop(self, made: _Made, letters: list[DeadLetter]) -> None:
        entry_ids = made.group.entry_ids
        for each in letters:
            get_logger().warning("dropped", sequence=each.seq_id, reason=each.reason, detail=each.detail)
        identity = _batch_id([*entry_ids, *(each.seq_id for each in letters)])
        await self._out(TrainingBatch(batch_id=identity, samples=[]), entry_ids, letters)
        self._export([made])

    async def _out(self, batch: TrainingBatch, entry_ids: list[str], letters: list[DeadLetter]) -> None:
        await self._history.flush()
        await hand_off(
            self._role.scripts,
            self._role.keys,
            reader=self._reader,
            owner_key=self._owner.key,
            nonce=self._owner.nonce,
            batch=batch,
            result_ids=entry_ids,
            result_bytes=sum(self._sizes[entry_id] for entry_id in entry_ids),
            drops=letters,
        )
        for entry_id in entry_ids:
            del self._sizes[entry_id]

    async def _at_the_end(self) -> bool:
        """Hand off what is left once no more results can come; True when the whole run is over."""
        now = await snapshot(self._role.client, self._role.keys)
        no_more = now.exhausted and now.queued_jobs <= now.evaluating_jobs and now.open_rollouts == 0
        if no_more and self._steps is not None and not self._groups and await self._reader.depth() == len(self._sizes):
            for step in self._steps.open:  # what they lack was trained before a broker lost its data
                await self._hand_off_step(step, self._steps.take(step))
        if no_more and not self._groups and await self._nothing_unread():
            if self._samples:
                await self._hand_off_batch()
            return now.complete
        return False

    async def _nothing_unread(self) -> bool:
        return await self._reader.depth() == len(self._entry_ids)

    def _pending(self) -> int:
        return len(self._samples) + sum(len(made.samples) for made in (() if self._steps is None else self._steps))

    def _report(self) -> None:
        role = self._role
        role.status.fact(handed=self._handed, pending=self._pending(), open_groups=len(self._groups))
        if self._failures:
            role.status.fact(reward_failures=self._failures)
        if self._scoring:
            role.status.waiting(WaitKind.REWARDS, count=sum(self._scoring.values()))
        else:
            role.status.waiting(WaitKind.RESULTS)


def _batch_id(parts: Sequence[str]) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()[:24]


async def consume(config: Config, partition: int | None) -> None:
    """Run the consumer of one partition; None claims the first free one, standing by until there is one."""
    if partition is not None and not 0 <= partition < config.consumer.count:
        raise ConfigError(f"--partition {partition}: consumer.count is {config.consumer.count}; give 0 to count-1")
    task, context = open_task(config)
    rewards = Rewards(config.rollout_matching, context.codec)
    choices = range(config.consumer.count) if partition is None else [partition]
    async with role_process(config, "consumer", default_name("consumer")) as role:
        held = await _first_free(role, list(choices))
        if held is None:
            return
        number, owner = held
        role.spawn(owner.keep())
        await Consumer(role, number, owner, task, context, rewards).run()
        await owner.release()


async def _first_free(role: Role, partitions: list[int]) -> tuple[int, Ownership] | None:
    """The partition that this process now owns; None if asked to stop before one was free."""
    owners = {number: Ownership(role.client, role.keys, f"consumer:{number}") for number in partitions}
    while True:
        for number, owner in owners.items():
            if await owner.try_acquire():
                role.status.waiting(None)
                return number, owner
        role.status.waiting(WaitKind.PARTITION)
        if not await role.nap(0.5):
            return None
