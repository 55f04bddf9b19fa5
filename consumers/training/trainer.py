"""The trainer: batches → optimiser steps → checkpoint → ack → new weight version.

    batches ─▶ samples_per_version samples ─▶ Filler ─▶ TrainStep ─▶ checkpoint ─▶ ack ─▶ write_version ─▶ register
                                  (with a policy loss)                durable

| waits for            | unblocked by                       |
|----------------------|------------------------------------|
| the trainer's role   | its last holder's end              |
| batches              | consumers                          |
| score jobs           | scorers, or `policy.score_wait_s`  |

- Exactly once: acks follow the checkpoint that holds their effect; what a dead trainer had read is read again.
- A sample that is dropped here is counted, with its letter, by the ack of its batch; where all of a step are dropped
  the weights have nothing of it, and the ack waits for no checkpoint.
- A version is registered only from a durable checkpoint that holds exactly those weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch

from sluice.consumers.history.recorder import TrainedRecorder
from sluice.consumers.samples import HAS_IMAGES, blind, letter
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training import checkpoint
from sluice.consumers.training.distributed import Shard, sharding
from sluice.consumers.training.model import load_policy, probe_score, probe_tokens
from sluice.consumers.training.proximal import Counts, Filled, Plan, fill, plan, score_jobs, scores_by_place
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.step_log import KeptRollouts, StepLog
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.ownership import Ownership
from sluice.pipeline.broker.streams import Entry, ack_batches, batch_reader
from sluice.pipeline.config.rules import policy_warnings
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DeadlineExceeded, MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.queue.trained import LEDGER, TrainedIds, begin_again, recognise
from sluice.pipeline.run import provenance
from sluice.pipeline.run.gpu import use_free_gpu
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.telemetry import training_metrics
from sluice.pipeline.weights import versions
from sluice.pipeline.wire.messages import (
    DeadLetter,
    ScoreJob,
    ScoreResult,
    TrainingBatch,
    TrainingSample,
    WeightVersion,
    decode,
)
from sluice.pipeline.wire.tokens import TokenArray

T = TypeVar("T")


@dataclass
class Taken:
    """A batch as it was read."""

    entry_id: str
    num_samples: int
    fresh: list[TrainingSample]  # those that these weights do not hold yet
    letters: list[DeadLetter] = field(default_factory=list)  # of those that are dropped


class Trainer:
    """The one trainer of a run."""

    def __init__(
        self, role: Role, owner: Ownership, step: TrainStep, source: Path, trackers: Trackers | None = None
    ) -> None:
        self._role, self._owner, self._step, self._source = role, owner, step, source
        self._trackers = trackers or Trackers(role.config)
        self._config = role.config
        run_dir = Path(role.config.run_dir) / role.config.run
        self._run_dir = run_dir
        self._checkpoints, self._versions = run_dir / "checkpoints", run_dir / "weights"
        self._metrics, self._trained = StepLog(run_dir / "metrics.jsonl"), StepLog(run_dir / LEDGER)
        self._known = TrainedIds(run_dir)
        self._rollouts = KeptRollouts(run_dir / "rollouts", role.config.trainer.keep_rollouts)
        self._history = TrainedRecorder(role.config)
        self._reader = batch_reader(role.client, role.keys, role.name, owner)
        self._registry = versions.WeightsRegistry(role.client, role.keys)
        self._published: tuple[int, float] | None = None  # the newest version of this process, its probe's score
        self._unread: deque[Entry] = deque()
        self._state = checkpoint.TrainerState()
        vocab = int(self._step.model.config.get_text_config().vocab_size)
        self._probe = probe_tokens(vocab, role.config.weights.probe_tokens, role.config.seed)
        self._filler: Filler | None = None
        if role.config.policy.enabled:
            self._filler = Filler(role, step, Scores(role.client, role.keys, owner.nonce))

    async def run(self) -> None:
        """Train until the run is complete, `max_versions` is reached, or a stop is asked for."""
        await self._resume()
        self._unread.extend(await self._reader.open())
        while not self._role.stop.is_set() and not self._enough_versions():
            batches = await self._next_batches()
            if not batches:
                break
            await self._train(batches)
        if self._state.unacked:  # steps since the last checkpoint, with checkpoint_every > 1
            await self._checkpoint()
        await self._history.close()
        self._known.close()

    def _enough_versions(self) -> bool:
        limit = self._config.trainer.max_versions
        return limit is not None and self._state.version >= limit

    async def _resume(self) -> None:
        client, keys = self._role.client, self._role.keys
        gone = not await recognise(client, keys, self._run_dir)
        found = await asyncio.to_thread(checkpoint.newest, self._checkpoints)
        if found is not None:
            self._role.status.waiting(f"checkpoint {found.name} to load")
            model, optimizer = self._step.model, self._step.optimizer
            self._state = await asyncio.to_thread(checkpoint.load, found, model, optimizer, self._config.model)
        if gone:
            so_far = f"step {self._state.step}"
            await begin_again(client, self._role.config, self._run_dir, self._state.version, so_far)
        if found is None:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            await self._publish(self._source)
        else:
            await self._ack()
            await self._publish(found)
            get_logger().info("resumed", step=self._state.step, version=self._state.version)
        for kept in (self._metrics, self._trained, self._rollouts):
            kept.cut_after(self._state.step)
        await asyncio.to_thread(self._known.open, self._state.step, self._state.recent)

    async def _next_batches(self) -> list[Taken]:
        """Batches worth one optimiser step; fewer at the end of the run; none when it is over or stopped."""
        wanted = self._config.producer.samples_per_version
        taken: list[Taken] = []
        until = time.monotonic() + self._config.trainer.batch_wait_s
        dry = False
        while sum(len(each.fresh) for each in taken) < wanted:
            if self._role.stop.is_set():
                return []
            if not self._unread:
                self._role.status.waiting("training batches from the consumers")
                dry = await self._source_is_dry()  # asked first: what was handed on by then is read now
                self._unread.extend(await self._reader.read(8, block_ms=1 if dry else 200))
            if self._unread:
                taken += await self._open(self._unread.popleft())
                until = time.monotonic() + self._config.trainer.batch_wait_s
            elif dry:
                break
            elif time.monotonic() > until:
                raise DeadlineExceeded(
                    f"no training batch for {self._config.trainer.batch_wait_s:.0f} s: are workers and consumers "
                    "alive? See `sluice status`"
                )
        self._role.status.waiting(None)
        return taken

    async def _source_is_dry(self) -> bool:
        now = await snapshot(self._role.client, self._role.keys)
        return now.exhausted and now.accepted + now.dead + now.dropped >= now.enqueued

    async def _was_the_last(self) -> bool:
        """Nothing comes after the steps that are not in a checkpoint yet."""
        if self._unread or not await self._source_is_dry():
            return False
        return await self._reader.depth() == len(self._state.unacked)

    async def _open(self, entry: Entry) -> list[Taken]:
        try:
            batch = decode(TrainingBatch, entry.fields[b"b"])
        except (MessageError, KeyError) as error:
            # Nothing but our consumer writes here: losing samples silently is worse than stopping.
            raise MessageError(f"{self._role.keys.batches} {entry.entry_id}: {error}") from error
        known, dropped = self._known.known(sample.seq_id for sample in batch.samples), self._state.dropped
        fresh = [sample for sample in batch.samples if sample.seq_id not in known and sample.seq_id not in dropped]
        again = [sample.seq_id for sample in batch.samples if sample.seq_id in dropped]
        letters = [letter(seq_id, dropped[seq_id], "dropped by the trainer before") for seq_id in again]
        taken = Taken(entry.entry_id, len(batch.samples), fresh, letters)
        if batch.samples and not fresh:
            get_logger().warning("batch was trained before; acked only", batch=batch.batch_id)
            await self._ack_now([taken])  # the broker undid the first count with the ack
            return []
        return [taken]

    async def _train(self, batches: list[Taken]) -> None:
        samples = await self._fill(batches)
        if samples is None:
            return
        dropped = [each for taken in batches for each in taken.letters]
        self._history.note(self._state.step + 1, self._state.version, samples, dropped)
        if not samples:
            get_logger().warning("all samples of a step were dropped; no update", batches=len(batches))
            await self._ack_now(batches, stepped=False)
            return
        state = self._state
        state.step += 1
        started = time.monotonic()
        record = await asyncio.to_thread(self._step.run, samples, state.step, version=state.version)
        record["train/step_s"] = time.monotonic() - started
        await self._owner.confirm()
        await self._write(self._rollouts.save, state.step, samples)
        state.take([(each.entry_id, each.num_samples, each.letters) for each in batches])
        state.samples += len(samples)
        state.tokens += int(record["train/tokens"])
        state.remember([sample.seq_id for sample in samples])
        record |= _combined(samples)
        record |= state.count(record)
        record |= self._filler.record() if self._filler else {}
        self._log(samples, record)
        if state.step % self._config.trainer.checkpoint_every == 0 or await self._was_the_last():
            await self._checkpoint()
        await self._show(record)

    async def _fill(self, batches: list[Taken]) -> list[TrainingSample] | None:
        """What is trained of them, with its proximal logprobs; None when asked to stop meanwhile."""
        samples = [sample for each in batches for sample in each.fresh]
        letters = {one.seq_id: letter(one.seq_id, HAS_IMAGES, blind(len(one.images))) for one in samples if one.images}
        samples = [sample for sample in samples if sample.seq_id not in letters]
        if self._filler is not None:
            ready = await self._filler.fill(samples, self._state.version)
            if ready is None:
                return None
            samples, letters = ready.samples, letters | ready.letters
        for each in batches:
            each.letters += [letters[sample.seq_id] for sample in each.fresh if sample.seq_id in letters]
        self._state.remember_dropped(letters.values())
        return samples

    def _log(self, samples: list[TrainingSample], record: dict[str, float]) -> None:
        """Before the checkpoint: a restart cuts lines of steps that it will redo, and misses none."""
        state = self._state
        self._metrics.append(state.step, version=state.version, at=time.time(), **record)
        self._trackers.log(state.step, record)
        self._role.telemetry.observe(sluice_train_step_seconds=record["train/step_s"])
        seq_ids = [sample.seq_id for sample in samples]
        self._trained.append(state.step, seq_ids=seq_ids)
        self._known.add(state.step, seq_ids)

    async def _checkpoint(self) -> None:
        await self._owner.confirm()
        # Not always the next one: see next_number.
        self._state.version = await self._registry.next_number(self._state.version, self._versions)
        directory = await self._write(
            checkpoint.save,
            self._checkpoints,
            self._step.model,
            self._step.optimizer,
            self._state,
            self._source,
        )
        await asyncio.to_thread(self._known.durable, self._state.step)
        await self._ack()
        await self._publish(directory)
        checkpoint.prune(self._checkpoints, self._config.trainer.keep_checkpoints)

    async def _write(self, write: Callable[..., T], *args: Any) -> T:
        """Write files; a trainer that was replaced meanwhile, whose files its successor swept, says just that."""
        try:
            return await asyncio.to_thread(write, *args)
        except OSError:
            await self._owner.confirm()
            raise

    async def _ack(self) -> None:
        state = self._state
        if state.unacked:
            await self._ack_pairs(state.unacked, state.unacked_drops)
        state.unacked, state.unacked_drops = [], {}

    async def _ack_now(self, batches: list[Taken], *, stepped: bool = True) -> None:
        pairs = [(each.entry_id, each.num_samples) for each in batches]
        await self._ack_pairs(pairs, {each.entry_id: each.letters for each in batches}, stepped=stepped)

    async def _ack_pairs(
        self, pairs: list[tuple[str, int]], drops: dict[str, list[DeadLetter]], *, stepped: bool = True
    ) -> None:
        await self._history.flush()
        scripts, keys, owner = self._role.scripts, self._role.keys, self._owner
        await ack_batches(scripts, keys, owner.key, owner.nonce, pairs, drops, stepped=stepped)
        self._reader.release([entry_id for entry_id, _ in pairs])

    async def _publish(self, directory: Path) -> None:
        version = self._state.version
        retention = self._config.weights.retention
        score = await asyncio.to_thread(probe_score, self._step.model, self._probe)
        manifest = WeightVersion(
            version=version,
            path="",
            digest="",
            probe_token_ids=TokenArray(self._probe),
            probe_score=score,
            previous=self._published[0] if self._published else None,
            previous_score=self._published[1] if self._published else None,
            step=self._state.step,
            published_at=time.time(),
        )
        full = await self._write(versions.write_version, directory, self._versions, manifest)
        await self._registry.register(full, self._owner.key, self._owner.nonce, retention)
        self._published = (version, score)
        await asyncio.to_thread(versions.retire, self._versions, version, retention)
        get_logger().info("published", version=version, digest=full.digest[:12])

    async def _show(self, record: dict[str, float]) -> None:
        state = self._state
        self._role.status.fact(step=state.step, version=state.version, samples=state.samples)
        line = msgspec.json.encode(record).decode()
        await cast("Awaitable[bool]", self._role.client.set(self._role.keys.metrics, line))
        shown = {"loss": "train/loss", "policy_loss": "policy/loss"}
        losses = {name: round(record[key], 4) for name, key in shown.items() if key in record}
        get_logger().info("step", step=state.step, **losses)


def _combined(samples: list[TrainingSample]) -> dict[str, float]:
    return training_metrics.reduce([sample.metrics for sample in samples])


class OwnScores(Protocol):
    """The trainer's model, before the update."""

    def score(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Per sample the fp32 logprob (nats) of each token, shape (len(token_ids),); position 0 holds 0.0."""
        ...


class AskedScores(Protocol):
    """Scorers of retained versions (pipeline/queue/scores.py)."""

    async def ask(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[ScoreResult]:
        """The answers that came within `wait_s`, in any order."""
        ...


@dataclass(frozen=True)
class Ready:
    """Samples to train, and a letter for each that is not."""

    samples: list[TrainingSample]
    letters: dict[str, DeadLetter]  # by seq_id


class Filler:
    """Fills one optimiser step's samples; counts until a step's record takes the counts."""

    def __init__(self, role: Role, own: OwnScores, asked: AskedScores) -> None:
        self._role, self._own, self._asked = role, own, asked
        self._options = role.config.policy
        self._counts = Counts()

    async def fill(self, samples: Sequence[TrainingSample], version: int) -> Ready | None:
        """`version`: that of the trainer's weights. None when the process is asked to stop meanwhile."""
        plans = await asyncio.to_thread(self._plans, samples, version)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask(list(plans.values())))
            recomputed = await asyncio.to_thread(self._recompute, list(plans.values()))
            results = await asking
        if results is None:
            return None
        done = await asyncio.to_thread(self._join, plans, recomputed, results)
        return self._sort(samples, done)

    def record(self) -> dict[str, float]:
        """The `policy/` keys of all that was filled since the last call: a step in which all was dropped has none."""
        counts, self._counts = self._counts, Counts()
        return counts.record()

    def _plans(self, samples: Sequence[TrainingSample], version: int) -> dict[str, Plan]:
        members = [sample for sample in samples if sample.advantage is not None]
        return {sample.seq_id: plan(sample, version, self._options) for sample in members}

    def _recompute(self, plans: Sequence[Plan]) -> dict[str, list[float]]:
        wanted = [each.sample for each in plans if each.recompute.any()]
        scores = self._own.score(wanted) if wanted else []
        return {sample.seq_id: row for sample, row in zip(wanted, scores, strict=True)}

    async def _ask(self, plans: Sequence[Plan]) -> list[ScoreResult] | None:
        """The answers that came in time; None when the process is asked to stop."""
        jobs = [job for each in plans for job in score_jobs(each, self._role.config.run)]
        if not jobs or not self._role.config.scorer.count:
            return []
        self._role.status.waiting(f"score jobs: {len(jobs)} of {len({job.seq_id for job in jobs})} samples")
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._asked.ask(jobs, self._options.score_wait_s))
            stopping = tasks.create_task(self._role.stop.wait())
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            asking.cancel()
        self._role.status.waiting(None)
        if asking.cancelled():
            return None
        results = asking.result()
        for error, count in Counter(result.error for result in results if result.error).items():
            get_logger().warning("no scores", cause=error, jobs=count)
        return results

    def _join(
        self, plans: dict[str, Plan], recomputed: dict[str, list[float]], results: Sequence[ScoreResult]
    ) -> dict[str, Filled]:
        answers: dict[str, list[ScoreResult]] = {}
        for result in results:
            answers.setdefault(result.seq_id, []).append(result)
        return {
            seq_id: fill(
                each, recomputed.get(seq_id, []), scores_by_place(each, answers.get(seq_id, [])), self._options
            )
            for seq_id, each in plans.items()
        }

    def _sort(self, samples: Sequence[TrainingSample], done: dict[str, Filled]) -> Ready:
        ready = Ready([], {})
        for sample in samples:
            filled = done.get(sample.seq_id)
            if filled is None:
                ready.samples.append(sample)
            elif filled.sample is not None:
                ready.samples.append(filled.sample)
            else:
                ready.letters[sample.seq_id] = letter(sample.seq_id, filled.reason or "", filled.detail)
        for filled in done.values():
            self._counts.add(filled.counts)
        for reason, count in Counter(each.reason for each in ready.letters.values()).items():
            get_logger().warning("samples dropped before the update", reason=reason, samples=count)
        return ready


async def train(config: Config) -> None:
    """Run the trainer to the end of the run."""
    with use_free_gpu(wanted=config.trainer.claim_gpu), sharding(config.model) as shard:
        await _train(config, shard)


async def _train(config: Config, shard: Shard | None) -> None:
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.trainer.torch_threads)
    source = Path(config.model.path)
    trackers = Trackers(config)  # here already: one that is not installed is no reason to load a model
    async with role_process(config, "trainer", default_name("trainer")) as role, trackers:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(deadline_s=60, waiting=role.status.waiting)
        role.spawn(owner.keep())
        provenance.store(config, Path(config.run_dir) / config.run)
        role.status.waiting(f"the model to load from {source}")
        model = await asyncio.to_thread(load_policy, source, config.model, dropout=config.trainer.dropout)
        codec = HFTextCodec(source)
        pad_id = codec.eos_token_ids[0] if codec.eos_token_ids else 0
        step = TrainStep(
            model,
            config.trainer,
            pad_id=pad_id,
            row_tokens=config.consumer.row_tokens,
            coord_ids=codec.coord_token_ids,
            policy=config.policy,
        )
        if shard is not None:
            await asyncio.to_thread(shard, step.model, step.optimizer)
        role.status.waiting("the proof of the forward pass")
        await asyncio.to_thread(step.prove)
        for warning in policy_warnings(config):
            get_logger().warning("policy loss", known=warning)
        await Trainer(role, owner, step, source, trackers).run()
        if (await snapshot(role.client, role.keys)).complete:
            await cast("Awaitable[bool]", role.client.set(role.keys.state, "finished"))
        await owner.release()
