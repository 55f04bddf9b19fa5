"""Before an update: every sampled token gets the proximal logprob that the loss uses, or is marked.

    samples ─▶ plan ─┬─▶ score jobs ─▶ scorers ─▶ results ─┬─▶ fill ─▶ samples to train, letters of the dropped
                     └─▶ the trainer's own pass under v ───┘

| waits for            | unblocked by                                              |
|----------------------|-----------------------------------------------------------|
| score jobs           | scorers, `policy.score_wait_s`, or a stop                 |

- Samples without an advantage have no part in the policy loss and pass unchanged.
- What a scorer does not answer in time is missing, and counted; nothing waits longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from consumers.samples import letter
from consumers.training.proximal import Filled, Plan, fill, plan, score_jobs, scores_by_place
from consumers.training.proximal_counts import Counts
from pipeline.logs import get_logger
from pipeline.run.role import Role
from pipeline.wire.messages import DeadLetter, ScoreJob, ScoreResult, TrainingSample


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
