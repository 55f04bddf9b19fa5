"""The guard behind Model Runner V2's logits processors: slots, and token ids that live on the device.

- A slot's first step reads what was generated so far from the device (prompt tokens are left out, but for the `offset`
  that were generated before a resume); every later step reads the one token that was fed.
- Rows in the middle of their prefill are left alone: their draw is thrown away.
- Speculative decoding gives a request several rows a step, and is refused at start.
- Reading the fed tokens waits for the device once a step.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from workers.guard.arguments import GuardArguments
from workers.guard.repeat import RepeatGuard
from workers.guard.requests import GuardRequests
from workers.guard.rows import force


class _Slot:
    """One request; `seen` visible tokens of it were read, prompt included, None before its first step."""

    __slots__ = ("asked", "guard", "sampling", "seen")

    def __init__(self, sampling: Any, guard: RepeatGuard, asked: GuardArguments) -> None:
        self.sampling, self.guard, self.asked = sampling, guard, asked
        self.seen: int | None = None


class V2Slots:
    """Follows request slots; `requests` knows rules and arguments, `state` is vLLM's `LogitsProcRequestState`."""

    def __init__(self, requests: GuardRequests, state: Any) -> None:
        self._requests, self._state = requests, state
        self._slots: dict[int, _Slot] = {}

    def add_request(self, slot: int, sampling: Any) -> bool:
        """A request takes the slot; whatever was there is gone."""
        self._slots[slot] = _Slot(sampling, *self._requests.begin(sampling))
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """float32 logits (rows, vocab), one row for each place of the batch: those that end now are forced."""
        began, forced = time.perf_counter_ns(), dict[int, int]()
        places = ctx.idx_mapping_np.tolist()
        visible = ctx.seq_lens_upper_bound_np.tolist()
        fed = ctx.input_ids.tolist()
        for row, number in enumerate(places):
            slot = self._slots.get(number)
            if slot is None or visible[row] < int(self._state.prefill_len.np[number]):
                continue
            self._read(slot, number, visible[row], fed[row])
            if (trigger := slot.guard.trigger) is not None:
                forced[row] = slot.asked.forced
                self._requests.note(slot.asked.key, trigger)
        if forced:
            force(logits, forced)
        self._requests.cost.step(began, len(places))
        return logits

    def _read(self, slot: _Slot, number: int, visible: int, fed: int) -> None:
        if slot.seen == visible:
            return
        if slot.seen is not None and visible == slot.seen + 1:
            slot.guard.push(fed)
        else:
            if slot.seen is not None:  # a step was missed: read all of it again
                slot.guard, slot.asked = self._requests.begin(slot.sampling)
            start = max(0, int(self._state.prompt_len.np[number]) - slot.asked.offset)
            slot.guard.push_all(self._state.all_token_ids.gpu[number, start:visible].tolist())
        slot.seen = visible
