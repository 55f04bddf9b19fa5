"""A task whose reward a tiny random model can earn: the share of its sampled tokens below 128."""

from __future__ import annotations

import msgspec

from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Matched, TaskContext
from sluice.pipeline.wire.messages import TrainingSample


def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """That of exact_answer with another reward."""
    tokens = matched.parsed.result.token_ids
    sample = exact_answer.target(matched, ctx)
    return msgspec.structs.replace(sample, reward=sum(token < 128 for token in tokens) / max(1, len(tokens)))
