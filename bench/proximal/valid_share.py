"""How many tokens that are older than the trainer's weights have a valid proximal logprob when they are trained.

    rollouts (versions 0 .. v, published and retired) ─▶ exact_answer's steps ─▶ Filler at v ─▶ valid ÷ older

- v is the retention. A queue of k versions holds the results that ended under v - k .. v; its trainer has the weights
  of v, a scorer process answers its jobs from the versions that are still on disk.
- A number that is marked as valid and is not that of a plain pass of its version ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.proximal.plan import Sizes
from sluice.bench.proximal.publisher import Publisher
from sluice.bench.proximal.rollouts import rollouts
from sluice.bench.proximal.versions import Variants
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import TaskContext
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.trainer import Filler
from sluice.pipeline.config import Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.run.role import Role, role_process
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample
from sluice.workers.engine.contracts import Backend

_TOLERANCE = 1e-2  # nats; engine, scorer and trainer pack their fp32 passes differently
_COUNTS = ("scored", "recomputed", "missing_proximal", "stale", "foreign")


async def valid_share(backend: Backend, variants: Variants, sizes: Sizes, config: Config) -> dict[str, Any]:
    """The fields, by k."""
    async with role_process(config, "trainer", "bench-trainer", asyncio.Event()) as role:
        root = Path(config.run_dir) / config.run / "weights"
        publisher = Publisher(role.client, Keys(config.run), root, variants, sizes.retention)
        await publisher.owner.confirm()
        role.spawn(publisher.owner.keep())

        async def publish(version: int) -> Path:
            return (await publisher.publish(version)).directory

        results = await rollouts(backend, publish, sizes.retention + 1, sizes)
        samples = await asyncio.to_thread(_samples, results, config)
        trainer = _Trainer(role, publisher.owner.nonce, variants, sizes.retention)
        await asyncio.to_thread(trainer.score_plainly, samples)
        found: dict[str, dict[str, Any]] = {}
        for held in range(1, sizes.retention + 1):
            queue = [sample for sample in samples if _ended_under(sample) >= sizes.retention - held]
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


def _ended_under(sample: TrainingSample) -> int:
    return max(sample.versions.expand())


def _counts(record: Mapping[str, float]) -> dict[str, int]:
    return {name: int(record[f"policy/{name}_tokens"]) for name in _COUNTS}


class _Trainer:
    """The trainer's part of an update before the loss, at one version."""

    def __init__(self, role: Role, nonce: str, variants: Variants, version: int) -> None:
        self._role, self._variants, self._version = role, variants, version
        self._filler = Filler(role, self._step(version), Scores(role.client, role.keys, nonce))
        self._plain: dict[tuple[str, int], list[float]] = {}  # (seq_id, version) -> logprobs of a plain pass

    def score_plainly(self, samples: Sequence[TrainingSample]) -> None:
        """Under every version that a proximal logprob may be of."""
        for version in range(1, self._version + 1):
            for sample, row in zip(samples, self._step(version).score(samples), strict=True):
                self._plain[sample.seq_id, version] = row

    async def fill(self, samples: Sequence[TrainingSample]) -> dict[str, Any]:
        """`share`, and what it is made of. Raises SluiceError for a wrong number."""
        ready = await self._filler.fill(samples, self._version)
        if ready is None or len(ready.samples) != len(samples):
            raise SluiceError(f"of {len(samples)} samples {len(ready.samples) if ready else 0} were filled")
        record, error = self._filler.record(), self._worst_error(ready.samples)
        if not error <= _TOLERANCE:
            raise SluiceError(f"a valid proximal logprob is {error:.4f} nats from that of its version")
        tokens = [version for sample in samples for version in sample.versions.expand() if version >= 0]
        older, counts = sum(version < self._version for version in tokens), _counts(record)
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
        """Greatest distance (nats) of what was filled in from a plain pass of the version that it names."""
        worst = 0.0
        for sample in samples:
            for at, mark in enumerate(sample.proximal_versions):
                if mark >= 0:
                    distance = abs(sample.proximal_logprobs[at] - self._plain[sample.seq_id, mark][at])
                    worst = max(worst, distance)
        return worst

    def _step(self, version: int) -> TrainStep:
        config = self._role.config
        model = load_policy(self._variants.directory(version), config.model)
        row_tokens, policy = config.consumer.row_tokens, config.policy
        return TrainStep(model, config.trainer, pad_id=0, row_tokens=row_tokens, policy=policy)
