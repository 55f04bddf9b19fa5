"""A group of results → its training samples, and a reason for each member that gives none.

With a policy loss, members with a reward also get their advantage within the group, unless the task gave one.
"""

from __future__ import annotations

import time
import traceback

import msgspec

from consumers.advantage import group_advantages
from consumers.group import Group
from consumers.task import Task, TaskContext
from pipeline.config.types import ConsumerConfig
from pipeline.errors import TaskError
from pipeline.messages import DeadLetter, SequenceResult, TrainingSample

_UNTRAINED_ENDINGS = {"deadline", "cancelled", "error"}
_DETAIL_CHARS = 1500
_MOST = 1e30  # of a reward or an advantage: the loss is in float32


class Sampler:
    """Runs the task's three steps. Pure: the same group gives the same samples and letters."""

    def __init__(self, task: Task, context: TaskContext, config: ConsumerConfig) -> None:
        self._task, self._context, self._config = task, context, config

    def samples_of(self, group: Group) -> tuple[list[TrainingSample], list[DeadLetter]]:
        """Samples in index order, and letters of the members that are dropped here."""
        letters = group.unrecorded
        samples: list[TrainingSample] = []
        for result in group.living:
            outcome = self._outcome(result)
            if isinstance(outcome, DeadLetter):
                letters.append(outcome)
            else:
                samples.append(outcome)
        if len(samples) < len(group.members) and self._config.on_incomplete_group == "drop":
            reason = f"another member of group {group.group_id} is missing"
            letters += [letter(sample.seq_id, "incomplete_group", reason) for sample in samples]
            samples = []
        return self._weighed(samples), letters

    def _weighed(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        policy = self._context.policy
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if not policy.enabled or not rewards:
            return samples
        advantages = iter(group_advantages(rewards, policy.advantage))
        found = [None if sample.reward is None else next(advantages) for sample in samples]
        return [
            sample if sample.advantage is not None else msgspec.structs.replace(sample, advantage=advantage)
            for sample, advantage in zip(samples, found, strict=True)
        ]

    def _outcome(self, result: SequenceResult) -> TrainingSample | DeadLetter:
        if result.finish_reason in _UNTRAINED_ENDINGS:
            return letter(result.seq_id, result.finish_reason, f"decode ended with {result.finish_reason}")
        try:
            parsed = self._task.parse(result, self._context)
            matched = self._task.match(parsed, result.truth, self._context)
            sample = self._task.target(matched, self._context)
        except TaskError as error:
            return letter(result.seq_id, "invalid_truth", str(error))
        except Exception:  # steps are the user's code: one that fails must not stop the run
            return letter(result.seq_id, "task_failed", traceback.format_exc()[-_DETAIL_CHARS:])
        for name, value in (("reward", sample.reward), ("advantage", sample.advantage)):
            if self._context.policy.enabled and not _is_number(value):
                detail = f"{name} {value}: the policy loss needs a number of at most ±{_MOST:g}, or None"
                return letter(result.seq_id, "task_failed", detail)
        length, most = len(sample.token_ids), self._config.max_sample_tokens
        if length > most:
            return letter(result.seq_id, "too_long", f"{length} tokens; consumer.max_sample_tokens is {most}")
        return sample


def _is_number(value: float | None) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= _MOST)


def letter(seq_id: str, reason: str, detail: str) -> DeadLetter:
    """A sequence that a consumer drops."""
    return DeadLetter(seq_id=seq_id, reason=reason, state="dropped", detail=detail[:_DETAIL_CHARS], at=time.time())
