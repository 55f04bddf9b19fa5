"""The rule that ends a looping sequence: pure, torch-free, constant cost per token.

- Only generated tokens are pushed: no prompt, no padding; every id, including 0, is a token.
- State grows from the first token; nothing triggers before `min_new_tokens` have been pushed.
- Order: object_keys, consecutive, ngram, any_period. A triggering state keeps triggering until the sequence changes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.object_keys import ObjectKeys

Rule = Literal["object_keys", "consecutive", "ngram", "any_period"]
OFF = 1 << 62
"""A count that no sequence reaches."""

LOOK_EVERY = 16
"""Tokens between two looks for a period; `any_period` triggers at whole multiples of it alone."""


@dataclass(frozen=True, slots=True)
class RepeatTrigger:
    """Why a sequence is ended; `at_token` tokens were generated before the forced end-of-sequence id."""

    rule: Rule
    at_token: int


class RepeatGuard:
    """Watches one sequence. `keys` counts `object_key_prefix`; required if `max_object_keys` is set."""

    __slots__ = (
        "_at", "_block", "_consecutive", "_key_count", "_keys", "_last", "_matched", "_max_keys", "_min", "_needed",
        "_periodic", "_recent", "_run", "_same", "_tail", "_window", "length", "trigger",
    )  # fmt: skip

    def __init__(self, config: RepeatTerminateConfig, keys: ObjectKeys | None = None) -> None:
        self.length = 0  # tokens pushed
        self.trigger: RepeatTrigger | None = None  # of the newest token
        self._min = config.min_new_tokens
        run, size, repeats = config.max_consecutive_token_repeats, config.ngram_size, config.ngram_repeats
        self._consecutive = run if run is not None and run > 0 else OFF
        self._last, self._run = -1, 0
        self._block = size if size is not None and size > 0 and repeats >= 2 else 0
        self._needed = self._block * (repeats - 1) if self._block else OFF
        self._recent = [-1] * self._block  # ring: the token `_block` positions ago is at `_at`
        self._at, self._same = 0, 0  # _same: length of the run of positions with tok[i] == tok[i - block]
        self._window = self._block * repeats if config.any_period else 0
        self._tail = array("q")  # at least the last `_window` tokens
        self._periodic = False  # found at this very token
        self._max_keys = OFF if config.max_object_keys is None or keys is None else config.max_object_keys
        self._keys = None if config.max_object_keys is None else keys
        self._matched, self._key_count = 0, 0

    def push(self, token: int) -> RepeatTrigger | None:
        """Take the next generated token; the trigger if the sequence must end after it."""
        self.length += 1
        if token == self._last:
            self._run += 1
        else:
            self._last, self._run = token, 1
        if self._block:
            at = self._at
            self._same = self._same + 1 if self._recent[at] == token else 0
            self._recent[at] = token
            self._at = at + 1 if at + 1 < self._block else 0
            if self._window:
                self._tail.append(token)
                self._periodic = self.length % LOOK_EVERY == 0 and self._look_back()
        if self._keys is not None:
            self._matched, found = self._keys.step(token, self._matched)
            self._key_count += found
        fires = (
            self._same >= self._needed
            or self._run >= self._consecutive
            or self._key_count >= self._max_keys
            or self._periodic
        )
        self.trigger = self._found() if fires and self.length >= self._min else None
        return self.trigger

    def push_all(self, tokens: Iterable[int]) -> RepeatTrigger | None:
        """Take several tokens; the trigger after the last one, regardless of earlier ones."""
        for token in tokens:
            self.push(token)
        return self.trigger

    def _look_back(self) -> bool:
        """Whether the last `_window` tokens have a period of at most `_block`.

        Only the smallest distance p at which the last block repeats has to be tried. If the window has a period
        q <= block, the last block + p tokens have the periods p and q, and so gcd(p, q) (Fine and Wilf 1965); p is the
        smallest, so it divides q and is a period of the window too.
        """
        tail, block, window = self._tail, self._block, self._window
        if len(tail) >= 4 * window:
            del tail[:-window]
        if self.length < max(window, self._min):
            return False
        backwards = tail[: -window - 1 : -1].tobytes()
        size, last = tail.itemsize, backwards[: block * tail.itemsize]
        at = backwards.find(last, size, 2 * len(last))
        while at % size:  # -1 is one of these as well
            if at < 0:
                return False
            at = backwards.find(last, at + 1, 2 * len(last))
        return backwards[at:] == backwards[:-at]

    def _found(self) -> RepeatTrigger:
        if self._key_count >= self._max_keys:
            return RepeatTrigger("object_keys", self.length)
        if self._run >= self._consecutive:
            return RepeatTrigger("consecutive", self.length)
        return RepeatTrigger("ngram" if self._same >= self._needed else "any_period", self.length)


def triggers(trigger: RepeatTrigger | None, *, active: bool) -> dict[str, Any]:
    """`repeat_terminate` 0|1, `active` 0|1 (a guard watched the sequence); with 1 also `rule` and `at_token`."""
    why = {} if trigger is None else {"rule": trigger.rule, "at_token": trigger.at_token}
    return {"repeat_terminate": int(trigger is not None), "active": int(active), **why}
