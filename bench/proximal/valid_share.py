"""How many tokens older than the trainer's weights have a valid proximal logprob when they are trained.

    rollouts (versions 0 .. v, published and retired) ─▶ exact_answer's steps ─▶ Filler at v ─▶ valid ÷ older

- v is the retention. A queue of k versions holds the results that ended under v - k .. v; its trainer has the weights
  of v, a scorer process answers its jobs from the versions that are still on disk.
- A number marked as valid that differs from a plain pass of its version fails the run.
- A wave of sequences of evenly spread lengths begins under each version; the next version comes when the longest of
  them has half of its tokens. The engine is blocked in that sequence's report until the load has been requested, and
  slow until it has been done, so its speed doesn't matter. Requests and results are those that a decode worker makes
  from jobs.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.broker import new_job
from sluice.bench.engines import random_ids
from sluice.bench.proximal.updates import WAIT_S, Plan
from sluice.bench.proximal.versions import Publisher, Variants
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import TaskContext
from sluice.consumers.training.checkpoint import TrainerState
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.trainer import Filler
from sluice.pipeline.config import Config
from sluice.pipeline.errors import DeadlineExceeded, SluiceError
from sluice.pipeline.queue import Claim
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.run.role import Role, role_process
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import Progress, SamplingParams, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.decode_worker import request_for, result_of
from sluice.workers.engine.contracts import Backend
from sluice.workers.job_prompts import JobPrompt

_TOLERANCE = 1e-2  # nats; engine, scorer and trainer pack their fp32 passes differently
_SHORTEST = 8  # tokens
_STEP_S = 0.05  # of the longest sequence while a version loads
_COUNTS = ("scored", "recomputed", "missing_proximal", "stale", "foreign")

Publish = Callable[[int], Awaitable[Path]]
"""Version -> its directory, once it is registered."""


async def valid_share(backend: Backend, variants: Variants, plan: Plan, config: Config) -> dict[str, Any]:
    async with role_process(config, "trainer", "bench-trainer", asyncio.Event()) as role:
        root = Path(config.run_dir) / config.run / "weights"
        publisher = Publisher(role.client, Keys(config.run), root, variants, plan.retention)
        await publisher.owner.confirm()
        role.spawn(publisher.owner.keep())

        async def publish(version: int) -> Path:
            return (await publisher.publish(version)).directory

        results = await rollouts(backend, publish, plan.retention + 1, plan)
        samples = await asyncio.to_thread(_samples, results, config)
        trainer = _Trainer(role, publisher.owner.nonce, variants, plan.retention)
        await asyncio.to_thread(trainer.score_plainly, samples)
        found: dict[str, dict[str, Any]] = {}
        for held in range(1, plan.retention + 1):
            queue = [sample for sample in samples if max(sample.versions.expand()) >= plan.retention - held]
            found[str(held)] = await trainer.fill(queue)
        await publisher.owner.release()
    return {"valid_share": {held: each.pop("share") for held, each in found.items()}, "measured": found}


def _samples(results: Sequence[SequenceResult], config: Config) -> list[TrainingSample]:
    """By the steps of the task `exact_answer`; the advantage is that of a group whose mean reward is 1/2."""
    ctx = TaskContext(HFTextCodec(config.model.path), config.rollout_matching, config.seed, config.policy)
    samples: list[TrainingSample] = []
    for result in results:
        matched = exact_answer.match(exact_answer.parse(result, ctx), result.truth, ctx)
        sample = exact_answer.target(matched, ctx)
        samples.append(msgspec.structs.replace(sample, advantage=(sample.reward or 0.0) - 0.5))
    return samples


class _Trainer:
    """The trainer's part of an update before the loss, at one version."""

    def __init__(self, role: Role, nonce: str, variants: Variants, version: int) -> None:
        self._role, self._variants, self._version = role, variants, version
        self._filler = Filler(role, self._step(version), Scores(role.client, role.keys, nonce))
        self._plain: dict[tuple[str, int], list[float]] = {}  # (seq_id, version) -> logprobs of a plain pass

    def score_plainly(self, samples: Sequence[TrainingSample]) -> None:
        """Score under every version a proximal logprob may belong to."""
        for version in range(1, self._version + 1):
            for sample, row in zip(samples, self._step(version).score(samples), strict=True):
                self._plain[sample.seq_id, version] = row

    async def fill(self, samples: Sequence[TrainingSample]) -> dict[str, Any]:
        """`share`, and what it is made of. Raises SluiceError for a wrong number."""
        ready = await self._filler.fill(samples, TrainerState(version=self._version))
        if ready is None or len(ready.samples) != len(samples):
            raise SluiceError(f"of {len(samples)} samples {len(ready.samples) if ready else 0} were filled")
        record, error = self._filler.record(), self._worst_error(ready.samples)
        if not error <= _TOLERANCE:
            raise SluiceError(f"a valid proximal logprob is {error:.4f} nats from that of its version")
        tokens = [version for sample in samples for version in sample.versions.expand() if version >= 0]
        older = sum(version < self._version for version in tokens)
        counts = {name: int(record[f"policy/{name}_tokens"]) for name in _COUNTS}
        return {
            "share": record["policy/valid_proximal_share"],
            "sequences": len(samples),
            "tokens": len(tokens),
            "older": older,
            "oldest": min(tokens),
            "in_flight": older - sum(counts.values()),  # scored by the prefill of an update
            **counts,
            "worst_error": error,
        }

    def _worst_error(self, samples: Sequence[TrainingSample]) -> float:
        """Greatest distance (nats) of the filled-in values from a plain pass of their version."""
        distances = (
            abs(sample.proximal_logprobs[at] - self._plain[sample.seq_id, mark][at])
            for sample in samples
            for at, mark in enumerate(sample.proximal_versions)
            if mark >= 0
        )
        return max(distances, default=0.0)

    def _step(self, version: int) -> TrainStep:
        config = self._role.config
        model = load_policy(self._variants.directory(version), config.model)
        row_tokens, policy = config.consumer.row_tokens, config.policy
        return TrainStep(model, config.trainer, pad_id=0, row_tokens=row_tokens, policy=policy)


async def rollouts(backend: Backend, publish: Publish, versions: int, plan: Plan) -> list[SequenceResult]:
    """All results, of versions 0 .. `versions` - 1."""
    results, steps = list[asyncio.Task[SequenceResult]](), max(1, plan.wave - 1)
    lengths = [_SHORTEST + index * (plan.wave_longest - _SHORTEST) // steps for index in range(plan.wave)]
    await backend.load_weights(await publish(0), 0)
    for version in range(versions):
        for number, length in enumerate(lengths[:-1]):
            results.append(asyncio.create_task(_decode(backend, f"{version}-{number}", length)))
        turn = _Turn(backend, publish, version + 1, lengths[-1] // 2) if version + 1 < versions else None
        results.append(asyncio.create_task(_decode(backend, f"{version}-last", lengths[-1], turn)))
        if turn is not None:
            await turn.loaded(results[-1])
    return list(await asyncio.wait_for(asyncio.gather(*results), WAIT_S))


class _Turn:
    """Loads a version once the leading sequence has that many tokens."""

    def __init__(self, backend: Backend, publish: Publish, version: int, at: int) -> None:
        self._backend, self._publish, self._version, self._at = backend, publish, version, at
        self._loop = asyncio.get_running_loop()
        self._load: asyncio.Future[asyncio.Task[None]] = self._loop.create_future()
        self._serves = threading.Event()

    def saw(self, so_far: Progress) -> None:
        """In the engine's thread, one token at a time."""
        count = so_far.offset + len(so_far.token_ids)
        if count == self._at:
            asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(WAIT_S)
        elif count > self._at:
            self._serves.wait(_STEP_S)  # or a slow load would find no sequence left

    async def loaded(self, leader: asyncio.Task[SequenceResult]) -> None:
        """Return once the version serves; raises any error before that."""
        done, _ = await asyncio.wait({self._load, leader}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineExceeded(f"waited {WAIT_S:.0f} s for a sequence to have {self._at} tokens")
        if not self._load.done():
            leader.result()
            raise DeadlineExceeded(f"a sequence ended before it had {self._at} tokens")
        await self._load.result()

    async def _ask(self) -> None:
        directory = await self._publish(self._version)
        load = asyncio.create_task(self._backend.load_weights(directory, self._version))
        load.add_done_callback(lambda _: self._serves.set())
        self._load.set_result(load)
        await asyncio.sleep(0)  # the engine has it after this


async def _decode(backend: Backend, name: str, num_new_tokens: int, turn: _Turn | None = None) -> SequenceResult:
    chance = random.Random(name)
    prompt = random_ids(chance, chance.randint(8, 48))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=num_new_tokens)
    job = new_job("bench", name, sampling, prompt_token_ids=TokenArray(prompt), truth="yes")
    claim = Claim(job_id=job.job_id, attempt=1, enqueued_at=time.time(), job=job)
    request = request_for(claim, job, JobPrompt(prompt), 0, seed=0, every=0, on_progress=lambda *_: None)
    if turn is not None:
        request = replace(request, report_every=1, report=turn.saw)
    output = await backend.decode(request)
    return result_of(claim, job, request, output, facts=backend.facts, worker="bench-worker")
