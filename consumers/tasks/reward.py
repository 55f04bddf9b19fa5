"""The task of a run that learns from rewards alone: what is trained is exactly what was sampled.

The reward is that of `rollout_matching.reward` (consumers/rewards.py), or comes with the rollout from the agent's side.
A truth is the reward function's business: it may be anything, or absent. `policy.ce_weight` is the cross-entropy
weight of answers whose reward is above 0.
"""

from __future__ import annotations

from typing import Any

from sluice.consumers.tasks.rollout import sampled_response, training_sample
from sluice.consumers.tasks.task import Matched, Parsed, TaskContext
from sluice.pipeline.errors import TaskError
from sluice.pipeline.wire.messages import TrainingSample


def match(parsed: Parsed, truth: Any, ctx: TaskContext) -> Matched:
    """Compares nothing."""
    return Matched(parsed, None, {})


def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """The sampled tokens of all turns; raises TaskError where no reward came."""
    parsed = matched.parsed
    reward = parsed.result.reward
    if reward is None:
        raise TaskError(
            f"{parsed.result.seq_id}: no reward came with its rollout; name a function in rollout_matching.reward, or "
            "send rewards from the agent's side"
        )
    response = sampled_response(parsed.result, reward > 0, ctx)
    return training_sample(parsed.result, response, parsed.metrics | matched.metrics, reward=reward)
