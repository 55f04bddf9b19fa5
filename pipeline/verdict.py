"""Whether a run moves, of two looks at it, one after the other. Pure.

- It stands still when something keeps it that does not end by itself, or when nothing moved, something keeps it and
  no process is at work.
- A process that is at work (a step, a long sequence) counts as movement to come.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.status import Snapshot
from pipeline.status_parts import Process
from pipeline.status_words import counted

_COUNTS = ("tokens", "enqueued", "committed", "accepted", "trained", "dead", "dropped")
_WORDS = {"committed": "decoded", "accepted": "handed on"}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `sluice status --why` says first."""

    state: Literal["complete", "idle", "moving", "working", "waiting", "stalled"]
    says: str
    moved: dict[str, int] = {}  # what was counted between the two looks
    over_s: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether nobody has to do anything."""
        return self.state != "stalled"


def verdict(before: Snapshot, now: Snapshot) -> Verdict:
    """`now` is a close look, with its stalls."""
    over_s = max(0.0, now.at - before.at)
    moved = {name: count for name in _COUNTS if (count := int(getattr(now, name) - getattr(before, name))) > 0}
    if now.latest_version != before.latest_version:
        moved["versions"] = (now.latest_version or 0) - (before.latest_version or 0) or 1
    state, says = _told(now, moved, f"{over_s:.1f} s")
    return Verdict(state=state, says=says, moved=moved, over_s=round(over_s, 3))


def _told(
    now: Snapshot, moved: dict[str, int], within: str
) -> tuple[Literal["complete", "idle", "moving", "working", "waiting", "stalled"], str]:
    if now.complete:
        return "complete", "the run is complete: nothing is left to do"
    if not (now.enqueued or now.processes):
        return "idle", "nothing was enqueued under this name and no process is alive: is it the run's name?"
    busy = [row.name for row in now.processes if _works(row)]
    blocking = [stall for stall in now.stalls if stall.blocks]
    seen = f"{_list(moved)} within {within}" if moved else f"nothing was counted within {within}"
    if blocking or (now.stalls and not moved and not busy):
        causes = counted(len(blocking or now.stalls), "cause")
        how = "it still moves, and will stop" if moved else "it stands still"
        return "stalled", f"{how}: {causes}, below; {seen}"
    if moved:
        return "moving", f"it moves: {seen}"
    if busy:
        return "working", f"it works: {seen}, and {busy[0]} is at work"
    return "waiting", f"it waits: {seen}, every process waits, and nothing that is known keeps them"


def _works(row: Process) -> bool:
    return row.is_alive and row.waiting_for is None and not row.is_onlooker


def _list(moved: dict[str, int]) -> str:
    others = ((_WORDS.get(name, name), count) for name, count in moved.items() if name not in ("tokens", "versions"))
    words = [f"{count:,} {name}" for name, count in others]
    if "tokens" in moved:
        words.insert(0, counted(moved["tokens"], "token"))
    if "versions" in moved:
        words.append(counted(moved["versions"], "new version of the weights", "new versions of the weights"))
    return ", ".join(words)
