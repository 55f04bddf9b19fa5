"""A batch in parts, each with an optimiser step of its own (`trainer.minibatches`).

- A step of the session, its record, checkpoint and version stay those of the whole batch: what counts steps or
  staleness doesn't see the parts.
- The samples of a group stay together, and the order is that of the batch, so a redone step makes the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipeline.wire.messages import TrainingSample


def minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """At most `count` parts of about as many samples each; fewer if there are too few groups."""
    if count == 1:
        return [list(samples)]
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    parts: dict[int, list[TrainingSample]] = {}
    before = 0
    for group in groups.values():
        parts.setdefault(before * count // len(samples), []).extend(group)
        before += len(group)
    return list(parts.values())
