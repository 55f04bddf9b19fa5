"""A batch in parts, each with an optimiser step of its own (`trainer.minibatches`).

- A step of the session, its record, checkpoint and version stay those of the whole batch: what counts steps or
  staleness doesn't see the parts.
- The samples of a group stay together, and the order is that of the batch, so a redone step makes the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.pipeline.wire.messages import TrainingSample


def minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """`count` parts of about as many samples each; one for each group if there are fewer groups."""
    if count == 1:
        return [list(samples)]
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    count = min(count, len(groups))
    parts: list[list[TrainingSample]] = []
    before = 0
    for number, group in enumerate(groups.values()):
        part = ((2 * before + len(group)) * count - 1) // (2 * len(samples))  # that of the group's middle
        # With groups of very different sizes: no part stays empty, neither before this one nor after the last group.
        part = max(min(part, len(parts)), count - len(groups) + number)
        if part == len(parts):
            parts.append([])
        parts[part] += group
        before += len(group)
    return parts
