"""One guarded sequence of a running batch, forcing a row to end, and the cost of guarding.

Shared by the adapters. In our own decode loop, `triggered` says which rows end with their next token; `force` makes
them end, and is the only change any adapter makes to an engine's numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sluice.workers.guard.repeat import RepeatGuard, RepeatTrigger


class Watch:
    """Follows a list of generated tokens that its engine appends to; `forced` is the id that ends the sequence.

    Negative ids are places an asynchronous scheduler hasn't filled yet; they are read later.
    """

    __slots__ = ("ended", "forced", "generated", "guard", "seen")

    def __init__(self, guard: RepeatGuard, generated: list[int], forced: int) -> None:
        self.guard, self.generated, self.forced = guard, generated, forced
        self.seen = 0
        self.ended = False  # the forced id was read

    def look(self) -> RepeatTrigger | None:
        """Read the new tokens; the trigger if the next token must be the forced one."""
        generated = self.generated
        while self.seen < len(generated):
            token = generated[self.seen]
            if token < 0:
                break
            self.seen += 1
            self.guard.push(token)
            self.ended = self.ended or token == self.forced
        return self.guard.trigger


@dataclass(slots=True)
class GuardCost:
    """Time spent in the guard and wall time, over the steps of a running batch."""

    spent_ns: int = 0
    elapsed_ns: int = 0
    steps: int = 0
    tokens: int = 0  # rows, summed over steps
    _last: int = 0

    def step(self, began_ns: int, rows: int) -> None:
        """Record one call of the guard that began at `time.perf_counter_ns()` and ends now."""
        now = time.perf_counter_ns()
        self.spent_ns += now - began_ns
        last, self._last = self._last, now  # read once: `taken` may come from another thread
        if last:
            self.elapsed_ns += now - last
        self.steps += 1
        self.tokens += rows

    def taken(self) -> GuardCost:
        """The counts so far; counting restarts with the next step."""
        cost = replace(self)
        self.spent_ns = self.elapsed_ns = self.steps = self.tokens = self._last = 0
        return cost


class Guarded(Protocol):
    """A row of the batch."""

    @property
    def watch(self) -> Watch | None:
        """None: not guarded."""
        ...


def triggered(rows: Sequence[Guarded], cost: GuardCost) -> dict[int, RepeatTrigger]:
    """Index → trigger of the rows that end with their next token."""
    began, found = time.perf_counter_ns(), dict[int, RepeatTrigger]()
    for index, row in enumerate(rows):
        watch = row.watch
        if watch is not None and (trigger := watch.look()) is not None:
            found[index] = trigger
    cost.step(began, len(rows))
    return found


def force(logits: torch.Tensor, tokens: Mapping[int, int]) -> torch.Tensor:
    """Set row r of `logits` (rows, vocab) to -inf except 0 at `tokens[r]`, in place; other rows are unchanged.

    `tokens` must not be empty. Returns `logits`.
    """
    rows = torch.tensor(list(tokens), device=logits.device)
    chosen = torch.tensor(list(tokens.values()), device=logits.device)
    logits[rows] = float("-inf")
    logits[rows, chosen] = 0.0
    return logits
