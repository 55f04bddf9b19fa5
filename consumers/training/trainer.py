"""The built-in trainer: turns the batches of a Session into optimiser steps, checkpoints and versions.

    Session.take ─▶ Filler ─┬─▶ score jobs ─▶ scorers ─▶ results ─┬─▶ TrainStep ─▶ Session.step ─┬─▶ commit: checkpoint
            (policy loss)   └─▶ the trainer's own pass under v ───┘                              └─▶ publish: version

| waits for            | unblocked by                                     |
|----------------------|--------------------------------------------------|
| the trainer's role   | its last holder's end                            |
| batches              | consumers                                        |
| score jobs           | scorers, `policy.score_wait_s`, or a stop        |
| the last checkpoint  | the disk; `trainer.checkpoint_timeout_s`         |

- With a policy loss every sampled token gets the proximal logprob that the loss uses, or is marked. Samples without an
  advantage take no part in it and pass unchanged. Scores that don't arrive in time are counted as missing.
- With `policy.kl_coef` the tokens are scored under the reference as well (policy/reference.py), in the same ask.
- Every `trainer.publish_every` steps the weights become a version, every `trainer.checkpoint_every` steps a checkpoint.
  If both are due, the checkpoint is durable before the version is registered, unless it's written beside the steps
  (`trainer.async_checkpoints`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from msgspec.structs import replace

from sluice.consumers.samples import letter
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training import checkpoint
from sluice.consumers.training.checkpoint import TrainerState, Unfinished
from sluice.consumers.training.forward import VisionSource
from sluice.consumers.training.images import ReceivedImages, SampleImages, pixels_of
from sluice.consumers.training.learner import Learner
from sluice.consumers.training.model import load_policy, probe_tokens, published_dtype, staging
from sluice.consumers.training.policy.dpo import NO_RECORD, pair_members, without_proximal
from sluice.consumers.training.policy.proximal import Counts, Filled, Plan, fill, plan, score_jobs, scores_by_place
from sluice.consumers.training.policy.reference import is_the_trainers, reference_jobs, reference_scores
from sluice.consumers.training.ranks.group import START, Ranks
from sluice.consumers.training.ranks.sharding import Sharding, passes_in_half, sharding
from sluice.consumers.training.session import Fence, Make, Session, Weights
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline import logs
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.rules import policy_warnings
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.run import preflight, provenance
from sluice.pipeline.run.role import Role, default_name, role_process, use_free_gpus
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.telemetry.spans import step_ref
from sluice.pipeline.weights.versions import Ahead, read_manifest
from sluice.pipeline.wire.messages import DeadLetter, ScoreJob, ScoreResult, TrainingSample
from sluice.pipeline.wire.waits import WaitKind

_ASK_AGAIN_S = 0.5


class Trainer:
    """The run's only trainer."""

    def __init__(
        self,
        role: Role,
        owner: Ownership,
        step: TrainStep,
        source: Path,
        trackers: Trackers | None = None,
        images: SampleImages | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`images`: those that `step` reads; `ranks`: those that it was made for."""
        self._role, self._source = role, source
        self._learner = Learner(step, source, role.config.model, ranks, images)
        self._config = role.config
        in_half = passes_in_half(role.config, os.environ)
        self._session = Session(
            role, owner, trackers or Trackers(role.config), images=images, probe_is_exact=not in_half
        )
        self._checkpoints = self._session.run_dir / "checkpoints"
        self._probe = probe_tokens(self._learner.vocabulary, role.config.weights.probe_tokens, role.config.seed)
        self._saving: asyncio.Task[None] | None = None  # a checkpoint beside the steps
        self._dtype, self._stalled_s = published_dtype(role.config), 0.0
        self._filler: Filler | None = None
        if role.config.policy.enabled:
            self._filler = Filler(role, self._learner, Scores(role.client, role.keys, owner.nonce))

    async def run(self) -> None:
        """Train until the run is complete, `max_versions` is reached, or a stop is requested."""
        await self._resume()
        while not self._role.stop.is_set() and not self._enough_versions():
            samples = await self._session.take()
            if not samples:
                break
            async with self._session.guarding_files():  # the step reads the samples' pixels
                await self._train(samples)
        await self._saved()
        uncommitted, stopped = self._session.uncommitted, self._role.stop.is_set()
        await self._save(checkpoint_due=uncommitted, publish_due=not stopped)
        await self._session.close()

    def _enough_versions(self) -> bool:
        limit = self._config.trainer.max_versions
        return limit is not None and self._session.state.published >= limit

    async def _resume(self) -> None:
        await self._session.claim_files()
        self._refuse_other_loop()
        found = await asyncio.to_thread(checkpoint.newest, self._checkpoints)
        if found is None:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            await self._session.open(TrainerState(), await asyncio.to_thread(self._weights, self._source))
            return
        self._role.status.waiting(WaitKind.CHECKPOINT, found.name)
        state = await asyncio.to_thread(self._learner.load, found)
        dtype = await asyncio.to_thread(self._dtype_of, state)
        if checkpoint.has_model(found) and dtype == "float32":
            await self._session.open(state, await asyncio.to_thread(self._weights, found))
        else:
            async with self._staged(dtype) as weights:
                await self._session.open(state, weights)
        get_logger().info("resumed", step=state.step, version=state.version)

    def _refuse_other_loop(self) -> None:
        """Starting from an older checkpoint, or from none, would cut what that loop has trained from the records."""
        state = checkpoint.of_own_loop(self._session.run_dir)
        if state is not None:
            raise ConfigError(
                f"{state}: a training loop of your own has trained this run, and the built-in trainer can't continue "
                "it: it has no optimiser state. Continue with that loop (trainer.external: true), or start a run of "
                f"another name from its weights in {self._session.root} (--set run=NAME --model DIRECTORY)"
            )

    def _weights(self, directory: Path) -> Weights:
        """The in-memory model's weights, as written to the directory."""
        return Weights(directory, self._probe, self._learner.probe(self._probe))

    def _dtype_of(self, state: TrainerState) -> str:
        """Of the files of the state's version: as they were published, whatever the configuration says by now."""
        with contextlib.suppress(WeightsError):  # it isn't there yet
            manifest = read_manifest(self._session.root / f"v{state.version:06d}")
            return (manifest.dtype or "float32") if state.is_published else self._dtype
        return self._dtype

    async def _train(self, taken: list[TrainingSample]) -> None:
        session, taken_at = self._session, time.monotonic()
        ready = await self._fill(taken)
        if ready is None:
            return
        samples = ready.samples
        record: dict[str, float] = {}
        if samples:
            started, number, state = time.monotonic(), session.state.step + 1, session.state
            version = state.version if state.is_published else None
            scores = {"own": ready.own, "reference": ready.reference}
            record = await asyncio.to_thread(self._learner.run, samples, number, version=version, **scores)
            record["train/step_s"] = time.monotonic() - started
            record["train/score_s"] = started - taken_at
            record["train/stall_s"] = self._stalled_s + self._learner.stalled_s()
            self._stalled_s = 0.0
            record |= self._filler.record() if self._filler else {}
        # A deterministic run counts every step: jobs wait for the version that follows it.
        if not await session.step(record, samples, empty=self._config.deterministic):
            return
        shown = {"loss": "train/loss", "policy_loss": "policy/loss"}
        losses = {name: round(record[key], 4) for name, key in shown.items() if key in record}
        get_logger().info("step", step=session.state.step, **losses)
        step, config = session.state.step, self._config.trainer
        publish_due = step % config.publish_every == 0
        checkpoint_due = step % config.checkpoint_every == 0 or session.holds_much
        is_last = not (publish_due and checkpoint_due) and await session.nothing_follows()
        await self._save(
            checkpoint_due=checkpoint_due or is_last,
            publish_due=publish_due or is_last,
            beside=config.async_checkpoints and not is_last,
        )

    async def _fill(self, samples: list[TrainingSample]) -> Ready | None:
        """The samples to train, with their proximal logprobs; None if asked to stop meanwhile."""
        if self._filler is None:
            return Ready(samples, {})
        ready = await self._filler.fill(samples, self._session.state)
        if ready is None:
            return None
        self._session.drop(ready.letters)
        return ready

    async def _save(self, *, checkpoint_due: bool, publish_due: bool, beside: bool = False) -> None:
        """Make the steps so far a checkpoint, a version, both (of the same files), or nothing.

        `beside`: return before the checkpoint is durable. A version of the same step is then published before it, as
        one without a checkpoint is.
        """
        session = self._session
        publish_due = publish_due and not session.state.is_published
        if not (publish_due or checkpoint_due):
            return
        started = time.monotonic()
        await session.published()  # what it has staged is gone then, and a checkpoint may name it
        one_set_of_files = self._learner.has_adapter or (checkpoint_due and self._dtype == "float32")
        async with contextlib.AsyncExitStack() as files:
            weights: Weights | None = None
            make: Make | None = None
            if publish_due and one_set_of_files:
                weights = await files.enter_async_context(self._staged(self._dtype))
            elif publish_due:
                make = await asyncio.to_thread(self._making, self._dtype)
            if not checkpoint_due:
                await self._publish(weights, make)
                self._stalled_s = time.monotonic() - started
                return
            written = None if weights is None else weights.directory
            await self._saved()
            if not beside:
                await session.commit(partial(self._write_checkpoint, written=written), weights, make=make)
                await self._prune()
                return
            limit_s = self._config.trainer.checkpoint_timeout_s
            async with session.guarding_files():
                step = session.state.step
                begun = await asyncio.to_thread(self._learner.begin, self._checkpoints, step, written, limit_s)
            await self._publish(weights, make)
            state = session.begin_commit()
            self._saving = self._role.spawn(self._end_commit(state, begun, limit_s))
            self._saving.set_name(f"step-{state.step:06d}")

    async def _publish(self, weights: Weights | None, make: Make | None) -> None:
        if weights is not None:
            await self._session.publish(weights)
        elif make is not None:
            await self._session.begin_publish(make)

    async def _end_commit(self, state: TrainerState, begun: Unfinished, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._session.end_commit(state, begun.complete)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the checkpoint of step {state.step} was not on disk after {limit_s:g} s; is the disk slow? Raise "
                "trainer.checkpoint_timeout_s, or set trainer.async_checkpoints: false"
            ) from error
        await self._prune()

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written, for at most what is left of its time."""
        if self._saving is not None:
            if not self._saving.done():
                self._role.status.waiting(WaitKind.SAVING, self._saving.get_name())
            await self._saving
            self._role.status.waiting(None)
            self._saving = None

    async def _prune(self) -> None:
        await asyncio.to_thread(checkpoint.prune, self._checkpoints, self._config.trainer.keep_checkpoints)

    @contextlib.asynccontextmanager
    async def _staged(self, dtype: str) -> AsyncGenerator[Weights]:
        """The in-memory model's, in files that are there inside the block."""
        weights = await asyncio.to_thread(lambda: self._making(dtype)(None))
        try:
            yield weights
        finally:
            await asyncio.to_thread(shutil.rmtree, weights.directory, ignore_errors=True)

    def _making(self, dtype: str) -> Make:
        """What writes the in-memory model's weights of now to a new directory, whatever becomes of them."""
        if self._learner.has_adapter:
            return self._write_adapter
        fill = self._learner.snapshot(dtype, self._probe)

        def make(ahead: Ahead | None) -> Weights:
            with staging(self._session.root) as directory:
                shards, score = fill(directory, ahead)
            return Weights(directory, self._probe, score, shards=shards, dtype="" if dtype == "float32" else dtype)

        return make

    def _write_adapter(self, _ahead: Ahead | None) -> Weights:
        with staging(self._session.root) as directory:
            self._learner.write(directory)
            return self._weights(directory)

    def _write_checkpoint(self, state: TrainerState, fence: Fence, written: Path | None = None) -> None:
        self._learner.save(self._checkpoints, state, fence, written)


class OwnScores(Protocol):
    """The trainer's model before the update."""

    def score(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Per sample, the fp32 logprob (nats) of each token, shape (len(token_ids),); position 0 holds 0.0."""
        ...


class AskedScores(Protocol):
    """Scorers of retained versions (pipeline/queue/scores.py)."""

    async def ask(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[ScoreResult]:
        """The answers that arrived within `wait_s`, in any order."""
        ...


@dataclass(frozen=True)
class Ready:
    """Samples to train, and a letter for each dropped one."""

    samples: list[TrainingSample]
    letters: dict[str, DeadLetter]  # by seq_id
    own: dict[str, np.ndarray] = field(default_factory=dict)  # by seq_id: bool [T], tokens that the trainer scored
    reference: dict[str, np.ndarray] = field(default_factory=dict)  # by seq_id: float [T], NaN where there is no score


class Filler:
    """Fills in the proximal logprobs of one optimiser step's samples; accumulates counts until `record` takes them."""

    def __init__(self, role: Role, own: OwnScores, asked: AskedScores) -> None:
        self._role, self._own, self._asked = role, own, asked
        self._options = role.config.policy
        self._counts = Counts()

    async def fill(self, samples: Sequence[TrainingSample], state: TrainerState) -> Ready | None:
        """`state`: of the trainer's weights. None if the process is asked to stop meanwhile."""
        plans = asked = await asyncio.to_thread(self._plans, samples, state)
        if self._options.by_pairs:
            plans = without_proximal(plans)
            asked = pair_members(plans, self._options)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask(list(asked.values()), state.step + 1))
            recomputed = await asyncio.to_thread(self._recompute, list(asked.values()))
            results = await asking
        if results is None:
            return None
        answers: dict[str, list[ScoreResult]] = {}
        for result in results:
            answers.setdefault(result.seq_id, []).append(result)
        done = await asyncio.to_thread(self._join, plans, recomputed, answers)
        ready = self._sort(samples, done)
        if self._options.reference is not None:
            ready.reference.update(reference_scores(asked, self._options.reference, recomputed, answers))
        ready.own.update({seq_id: each.recompute for seq_id, each in plans.items() if each.recompute.any()})
        return ready

    def record(self) -> dict[str, float]:
        """The `policy/` keys of everything filled since the last call: a step with all samples dropped has none."""
        counts, self._counts = self._counts, Counts()
        found = counts.record()
        return {key: found[key] for key in found if not (self._options.by_pairs and key in NO_RECORD)}

    def _plans(self, samples: Sequence[TrainingSample], state: TrainerState) -> dict[str, Plan]:
        members = [sample for sample in samples if sample.advantage is not None]
        own = state.version if state.is_published else None
        return {each.seq_id: plan(each, state.line, self._options, own_version=own) for each in members}

    def _recompute(self, plans: Sequence[Plan]) -> dict[str, list[float]]:
        reference = self._options.reference
        wanted = [each.sample for each in plans if each.recompute.any() or is_the_trainers(each, reference)]
        scores = self._own.score(wanted) if wanted else []
        return {sample.seq_id: row for sample, row in zip(wanted, scores, strict=True)}

    async def _ask(self, plans: Sequence[Plan], step: int) -> list[ScoreResult] | None:
        """The answers that arrived in time; None if the process is asked to stop."""
        run = self._role.config.run
        jobs = [job for each in plans for job in score_jobs(each, run)]
        jobs += reference_jobs(plans, self._options.reference, run)
        if not jobs or not self._role.config.scorer.count:
            return []
        if self._role.tracing.enabled:
            trace = step_ref(run, step).carrier()
            jobs = [replace(job, trace=trace) for job in jobs]
        samples = len({job.seq_id for job in jobs})
        self._role.status.waiting(WaitKind.SCORES, f"{samples} samples", len(jobs))
        every = self._role.config.deterministic
        asking = self._every(jobs) if every else self._asked.ask(jobs, self._options.score_wait_s)
        results = await self._role.unless_stopped(asking)
        self._role.status.waiting(None)
        if results is not None and not every:
            _warn_of_errors(results)
        return results

    async def _every(self, jobs: Sequence[ScoreJob]) -> list[ScoreResult]:
        """An answer for each job: which tokens have a score must not depend on time. Raises DeadlineExceeded."""
        limit_s = self._role.config.trainer.batch_wait_s
        found, until = list[ScoreResult](), time.monotonic() + limit_s
        while jobs:
            answers = await self._asked.ask(jobs, self._options.score_wait_s)
            _warn_of_errors(answers)
            found += [answer for answer in answers if not answer.error]
            known = {(answer.seq_id, answer.scored_version, *answer.positions) for answer in found}
            jobs = [job for job in jobs if (job.seq_id, job.version, *job.positions) not in known]
            if jobs and time.monotonic() > until:
                why = next((f": {answer.error}" for answer in answers if answer.error), "; is a scorer alive?")
                raise DeadlineExceeded(f"{len(jobs)} score jobs without scores for {limit_s:.0f} s{why}")
            if jobs:
                await asyncio.sleep(_ASK_AGAIN_S)
        return found

    def _join(
        self, plans: dict[str, Plan], recomputed: dict[str, list[float]], answers: dict[str, list[ScoreResult]]
    ) -> dict[str, Filled]:
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


def _warn_of_errors(answers: Sequence[ScoreResult]) -> None:
    for error, count in Counter(answer.error for answer in answers if answer.error).items():
        get_logger().warning("no scores", cause=error, jobs=count)


async def train(config: Config) -> None:
    """Run the trainer until the run ends; on several ranks, this one's part of it."""
    with use_free_gpus(wanted=config.trainer.claim_gpu), sharding(config) as shards:
        if shards is None or shards.ranks is None:
            await _train(config, shards, None)
        elif shards.ranks.leads:
            async with shards.ranks.kept():
                await _train(config, shards, shards.ranks)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):  # sent to all ranks; rank 0 says when the others are done
                signal.signal(number, signal.SIG_IGN)
            await asyncio.to_thread(_follow, config, shards, shards.ranks)


def _follow(config: Config, shards: Sharding, ranks: Ranks) -> None:
    """The other ranks: rank 0 says what to do, also when to stop."""
    logs.configure(f"{default_name('trainer')} rank {ranks.rank}")
    if ranks.receive() is None:  # it ends before it has the trainer's role
        return
    with ranks.following("the start"):
        images = ReceivedImages.of(config, pixels_of(config))
        step = _prepare(config, shards, images)
        step.prove()
    Learner(step, Path(config.model.path), config.model, ranks, images).follow()


def _prepare(config: Config, shards: Sharding | None, images: VisionSource | None) -> TrainStep:
    """The model and its optimiser; on every rank at the same time."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.trainer.torch_threads)
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic and shards is not None:
        raise ConfigError("deterministic needs a trainer of one process, and this one has several ranks")
    source = Path(config.model.path)
    place = config.model if shards is None else replace(config.model, device=str(shards.device))
    mesh = None if shards is None else shards.mesh
    model = load_policy(source, place, dropout=config.trainer.dropout, mesh=mesh)
    codec = HFTextCodec(source)
    step = TrainStep(
        model,
        config.trainer,
        pad_id=codec.eos_token_ids[0] if codec.eos_token_ids else 0,
        row_tokens=config.consumer.row_tokens,
        coord_ids=codec.coord_token_ids,
        policy=config.policy,
        images=images,
        ranks=None if shards is None or mesh is not None else shards.ranks,  # with a mesh all do the same passes
        **({} if shards is None else {"shard": shards.before_optimizer}),
    )
    if shards is not None:
        shards.after_optimizer(step.model, step.optimizer)
    return step


def _start(role: Role, shards: Sharding | None, ranks: Ranks | None, images: SampleImages | None) -> TrainStep:
    """The same with the forward pass proved, on every rank."""
    with contextlib.nullcontext() if ranks is None else ranks.leading("the start", START):
        step = _prepare(role.config, shards, images)
        role.status.waiting(WaitKind.FORWARD_PROOF)
        step.prove()
    return step


async def _train(config: Config, shards: Sharding | None, ranks: Ranks | None) -> None:
    preflight.model(config, needed=True)
    source = Path(config.model.path)
    trackers = Trackers(config)  # this early: if one isn't installed, fail before loading a model
    async with role_process(config, "trainer", default_name("trainer")) as role, trackers:
        if ranks is not None:
            role.spawn(ranks.watch())
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(deadline_s=60, waiting=role.status.waiting)
        role.spawn(owner.keep())
        await cast("Awaitable[int]", role.client.delete(role.keys.state))  # how an earlier start ended
        provenance.store(config, Path(config.run_dir) / config.run)
        images = await asyncio.to_thread(SampleImages.of, config, pixels_of(config))
        if ranks is not None and images is not None and shards is not None and not shards.sees:
            raise ConfigError(
                "trainer.tensor_parallel isn't supported with a model that takes images; set it to 1"
                if shards.mesh is not None
                else f"accelerate shards a vision tower by its layers, and of {ranks.size} ranks those without images "
                "in a pass would never meet the others there; start the trainer with trainer.ranks or torchrun"
            )
        if shards is not None and config.trainer.optimizer != "adamw":
            raise ConfigError(
                f"trainer.optimizer {config.trainer.optimizer} isn't supported with FSDP; set it to adamw"
            )
        role.status.waiting(WaitKind.MODEL, str(source))
        step = await asyncio.to_thread(_start, role, shards, ranks, images)
        for warning in policy_warnings(config):
            get_logger().warning("policy loss", known=warning)
        async with images or contextlib.nullcontext():
            await Trainer(role, owner, step, source, trackers, images, ranks).run()
        is_complete = (await snapshot(role.client, role.keys)).complete
        if is_complete or not role.stop.is_set():  # the evaluator ends after this version
            word = "finished" if is_complete else "stopped"
            await cast("Awaitable[bool]", role.client.set(role.keys.state, word))
        await owner.release()
