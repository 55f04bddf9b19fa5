"""Advantages again: from the stored rewards of a group, by the run's own definition of them.

- A group is trained in one step, so its members are sought there, also where `--limit` leaves some of them out.
- The advantage compares all members that had a reward. `group_rewards` says how many they were; with fewer stored (the
  trainer dropped some) nothing can be said, unless it needs no comparison.
- Parts of one index (a rollout whose history forked) count once, with the reward of the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from consumers.advantage import group_advantages
from consumers.audit.report import Unchecked
from consumers.audit.stored import Stored
from pipeline.config.types import Config
from pipeline.wire.messages import TrainingSample

_RELATIVE = 1e-6  # the same code on the same numbers, maybe on another machine


@dataclass(frozen=True)
class Compared:
    """An advantage that was computed again; `expected` None where there should be none."""

    stored: float | None
    expected: float | None

    @property
    def is_right(self) -> bool:
        if self.stored is None or self.expected is None:
            return self.stored is self.expected
        return math.isclose(self.stored, self.expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE)


Place = int | str
"""Index in the group; of samples that do not say theirs, the id of the sequence."""


@dataclass(frozen=True)
class _Group:
    expected: dict[Place, float]  # advantages of the members that have a reward
    names: frozenset[str]
    is_forked: bool  # parts of one index differ in their rewards


class Groups:
    """The rewards of all stored samples, by step and group."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._members: dict[tuple[int, str], list[tuple[str, int, float | None]]] = {}
        self._compared: dict[tuple[int, str], _Group] = {}

    def noting(self, sequences: Iterable[Stored]) -> Iterator[Stored]:
        """The same sequences; their rewards are noted as they pass."""
        for stored in sequences:
            sample = stored.sample
            member = (sample.seq_id, sample.index, sample.reward)
            self._members.setdefault((stored.step, sample.group_id), []).append(member)
            yield stored

    def compare(self, stored: Stored) -> Compared | Unchecked | None:
        """None where there is no advantage and none is due."""
        sample, policy = stored.sample, self._config.policy
        if not sample.group_rewards:
            if sample.advantage is None:
                return None
            if sample.index >= 0:
                return "advantage_of_task"
        group = self._group(stored)
        if policy.advantage != "reward" and (gap := self._gap(sample, len(group.expected))):
            return gap
        found = Compared(sample.advantage, group.expected.get(_place(sample.seq_id, sample.index, group.names)))
        # The first part may be one that the trainer dropped, and parts may have rewards of their own.
        return "group_incomplete" if group.is_forked and not found.is_right else found

    def _gap(self, sample: TrainingSample, rewards: int) -> Unchecked | None:
        if sample.index >= 0:
            return "group_incomplete" if rewards < sample.group_rewards else None
        is_known = self._config.rollout_matching.target is None and rewards >= max(2, self._config.producer.group_size)
        return None if is_known else "advantage_unstamped"

    def _group(self, stored: Stored) -> _Group:
        key = stored.step, stored.sample.group_id
        if key not in self._compared:
            names = frozenset(seq_id for seq_id, _, _ in self._members[key])
            firsts: dict[Place, float | None] = {}
            is_forked = False
            for seq_id, index, reward in self._members[key]:
                is_forked |= firsts.setdefault(_place(seq_id, index, names), reward) != reward
            rewards = {place: reward for place, reward in firsts.items() if reward is not None}
            advantages = group_advantages(list(rewards.values()), self._config.policy.advantage)
            self._compared[key] = _Group(dict(zip(rewards, advantages, strict=True)), names, is_forked)
        return self._compared[key]


def _place(seq_id: str, index: int, names: frozenset[str]) -> Place:
    """Without an index `r/1` is a part of `r`, if there is an `r`."""
    if index >= 0:
        return index
    whole, _, part = seq_id.rpartition("/")
    return whole if part.isdecimal() and whole in names else seq_id
