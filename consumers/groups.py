"""Assembles groups from their members. Entries stay unacked in the stream until their group is handed off,
so nothing is lost when an assembler is killed: its successor reads them again.

- A member is one part of one index: a rollout with a forked history has several.
- An index is complete when all its parts have arrived, or its tombstone, which has no parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sluice.pipeline.queue import StepRow
from sluice.pipeline.wire.codec import integer_or
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult

T = TypeVar("T")

Place = tuple[int, int]
"""Index in the group, and part of that index."""


@dataclass
class Group:
    """Members so far, by (index, part); a dead member is its DeadLetter."""

    group_id: str
    size: int
    members: dict[Place, SequenceResult | DeadLetter] = field(default_factory=dict)
    entry_ids: list[str] = field(default_factory=list)
    parts: dict[int, int] = field(default_factory=dict)  # index → number of parts
    unrecorded: list[DeadLetter] = field(default_factory=list)  # members that died here, not in the queue
    entry_of: dict[Place, str] = field(default_factory=dict)  # of `entry_ids`, by member

    @property
    def complete(self) -> bool:
        """All members are here, alive or dead."""
        return len(self.parts) >= self.size and len(self.members) >= sum(self.parts.values())

    def committed_at(self, result: SequenceResult) -> float:
        """Unix time of the broker when this member was committed: its entry's id says it. 0: unknown."""
        entry_id = self.entry_of.get((result.index, result.part), "")
        return integer_or(entry_id.partition("-")[0], 0) / 1000

    @property
    def living(self) -> list[SequenceResult]:
        """Results ordered by index and part."""
        return [m for _, m in sorted(self.members.items()) if isinstance(m, SequenceResult)]


class Assembler:
    """Holds the incomplete groups."""

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}

    def add_result(self, entry_id: str, result: SequenceResult) -> Group | None:
        """Returns the group if this member completes it."""
        place = (result.index, result.part)
        return self._add(entry_id, result.group_id, result.group_size, place, result.parts, result)

    def add_dead(self, entry_id: str, group_id: str, size: int, index: int, letter: DeadLetter) -> Group | None:
        """The same for a tombstone; its writer has already counted it."""
        return self._add(entry_id, group_id, size, (index, 0), 1, letter)

    def add_unreadable(
        self, entry_id: str, group_id: str, size: int, place: Place, parts: int, letter: DeadLetter
    ) -> Group | None:
        """The same for an unreadable result: its letter still has to be recorded."""
        self._group(group_id, size).unrecorded.append(letter)
        return self._add(entry_id, group_id, size, place, parts, letter)

    def __len__(self) -> int:
        return len(self._open)

    def _add(
        self,
        entry_id: str,
        group_id: str,
        size: int,
        place: Place,
        parts: int,
        member: SequenceResult | DeadLetter,
    ) -> Group | None:
        group = self._group(group_id, size)
        group.members[place] = member
        group.parts[place[0]] = parts
        group.entry_ids.append(entry_id)
        group.entry_of[place] = entry_id
        return self._open.pop(group.group_id) if group.complete else None

    def _group(self, group_id: str, size: int) -> Group:
        return self._open.setdefault(group_id, Group(group_id, size))


class Steps(Generic[T]):
    """Of a deterministic run: holds each finished group until all groups of its optimiser step are here."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, T]] = {}  # step → row → group

    def holds(self, place: StepRow) -> bool:
        """Whether this row is here already."""
        return place.row in self._open.get(place.step, {})

    def add(self, place: StepRow, group: T) -> list[T] | None:
        """The groups of the step in the order of their rows, if this one completes it."""
        rows = self._open.setdefault(place.step, {})
        rows[place.row] = group
        return self.take(place.step) if len(rows) >= place.rows else None

    def take(self, step: int) -> list[T]:
        """Its groups so far, in the order of their rows."""
        return [group for _, group in sorted(self._open.pop(step).items())]

    @property
    def open(self) -> list[int]:
        """Incomplete steps, in order."""
        return sorted(self._open)

    def __iter__(self) -> Iterator[T]:
        return (group for rows in self._open.values() for group in rows.values())
