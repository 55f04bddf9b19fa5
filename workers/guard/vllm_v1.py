"""The guard behind vLLM's V1 logits processors: rows of the batch, and vLLM's own growing lists of output tokens.

- A row begins with the last `offset` tokens of its prompt: what was generated before it was resumed.
- vLLM's list is read in `apply`, where an asynchronous scheduler has filled its places.
- A draw for half a prefill is thrown away: the row triggers again when its token counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from workers.guard.requests import GuardRequests
from workers.guard.rows import force
from workers.guard.watch import Watch


class V1Rows:
    """Follows `BatchUpdate`s; `requests` knows rules and arguments."""

    def __init__(self, requests: GuardRequests, swap: Any) -> None:
        """`swap`: vLLM's `MoveDirectionality.SWAP`."""
        self._requests, self._swap = requests, swap
        self._rows: dict[int, tuple[Watch, str]] = {}

    def update_state(self, batch_update: Any) -> None:
        """Rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, sampling, prompt, generated in batch_update.added:
            rows[index] = self._watched(sampling, prompt or [], generated)
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if direction == self._swap and replaced is not None:
                rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 logits (rows, vocab): the rows that end now have one finite entry."""
        began, forced = time.perf_counter_ns(), dict[int, int]()
        for index, (watch, key) in self._rows.items():
            if (trigger := watch.look()) is not None:
                forced[index] = watch.forced
                self._requests.note(key, trigger)
        if forced:
            force(logits, forced)
        self._requests.cost.step(began, len(self._rows))
        return logits

    def _watched(self, sampling: Any, prompt: Sequence[int], generated: list[int]) -> tuple[Watch, str]:
        guard, asked = self._requests.begin(sampling)
        if asked.offset:
            guard.push_all(prompt[-asked.offset :])
        return Watch(guard, generated, asked.forced), asked.key
