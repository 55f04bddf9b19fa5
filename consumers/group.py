"""Puts the members of a group together. Entries stay unacked in the stream until their group is handed on,
so a killed assembler loses nothing: its successor reads them again."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.messages import DeadLetter, SequenceResult


@dataclass
class Group:
    """Members so far, by index; a dead member is its DeadLetter."""

    group_id: str
    size: int
    members: dict[int, SequenceResult | DeadLetter] = field(default_factory=dict)
    entry_ids: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All members are here, alive or dead."""
        return len(self.members) >= self.size

    @property
    def unrecorded(self) -> list[DeadLetter]:
        """Members that ended in the consumer; those that died in the queue are recorded there."""
        return [m for m in self.members.values() if isinstance(m, DeadLetter) and m.state == "dropped"]

    @property
    def living(self) -> list[SequenceResult]:
        """Results in index order."""
        return [m for _, m in sorted(self.members.items()) if isinstance(m, SequenceResult)]


class Assembler:
    """Groups in the making."""

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}

    def add_result(self, entry_id: str, result: SequenceResult) -> Group | None:
        """Returns the group when this member completes it."""
        return self._add(entry_id, result.group_id, result.group_size, result.index, result)

    def add_dead(self, entry_id: str, group_id: str, size: int, index: int, letter: DeadLetter) -> Group | None:
        """The same for a tombstone, or for a result that cannot be read."""
        return self._add(entry_id, group_id, size, index, letter)

    def __len__(self) -> int:
        return len(self._open)

    def _add(
        self, entry_id: str, group_id: str, size: int, index: int, member: SequenceResult | DeadLetter
    ) -> Group | None:
        group = self._open.setdefault(group_id, Group(group_id, size))
        group.members[index] = member
        group.entry_ids.append(entry_id)
        return self._open.pop(group.group_id) if group.complete else None
