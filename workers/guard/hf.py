"""The guard in our own decode loop: which rows end with their next token; `rows.force` then makes it so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from workers.guard.repeat import RepeatTrigger
from workers.guard.watch import GuardCost, Watch


class Guarded(Protocol):
    """A row of the batch."""

    @property
    def watch(self) -> Watch | None:
        """None: not guarded."""
        ...


def triggered(rows: Sequence[Guarded], cost: GuardCost) -> dict[int, RepeatTrigger]:
    """Index → trigger of the rows whose next token ends them."""
    began, found = time.perf_counter_ns(), dict[int, RepeatTrigger]()
    for index, row in enumerate(rows):
        watch = row.watch
        if watch is not None and (trigger := watch.look()) is not None:
            found[index] = trigger
    cost.step(began, len(rows))
    return found
