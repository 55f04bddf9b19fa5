"""Puts the members of a group together. Entries stay unacked in the stream until their group is handed on,
so a killed assembler loses nothing: its successor reads them again."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.messages import DeadLetter, SequenceResult


@dataclass
class Group:
    """Members so far, by index; a dead member is its DeadLetter."""

    group_id: str
    size: int | None = None  # unknown until a living member arrives
    members: dict[int, SequenceResult | DeadLetter] = field(default_factory=dict)
    entry_ids: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All members are here; a group whose members all died is complete at any size."""
        if self.size is None:
            return bool(self.members)
        return len(self.members) >= self.size

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
        group = self._open.setdefault(result.group_id, Group(result.group_id))
        group.size = result.group_size
        group.members[result.index] = result
        return self._close_if_complete(group, entry_id)

    def add_dead(self, entry_id: str, group_id: str, letter: DeadLetter) -> Group | None:
        """The same for a tombstone."""
        group = self._open.setdefault(group_id, Group(group_id))
        group.members[int(letter.seq_id.rpartition(":")[2])] = letter
        return self._close_if_complete(group, entry_id)

    def __len__(self) -> int:
        return len(self._open)

    def _close_if_complete(self, group: Group, entry_id: str) -> Group | None:
        group.entry_ids.append(entry_id)
        return self._open.pop(group.group_id) if group.complete else None
