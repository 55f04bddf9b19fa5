"""Sequences that a swap took out of the core, on their way back: in slices, so that tokens come in between.

    swap ─▶ slice ─▶ its first tokens ─▶ slice ─▶ its first tokens ─▶ ... ─▶ all run
             shortest first, at most so many tokens that their prefill fits into `max_pause_s`

The rate is measured slice by slice; the first slice of all is small. A sequence longer than a slice goes alone: vLLM
prefills it in chunks, and decodes what already runs between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
FIRST_TOKENS = 512


class Resubmission(Generic[K]):
    """Which of the waiting may be sent; `changed` is called when another slice may."""

    def __init__(
        self, max_pause_s: float | None, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_pause_s` None: all at once. `clock` gives seconds."""
        self._max_pause_s, self._changed, self._clock = max_pause_s, changed, clock
        self._tokens_per_s: float | None = None
        self._waiting: list[tuple[int, K]] = []  # tokens to prefill; longest first
        self._slice: dict[K, int] = {}
        self._begun: tuple[int, float] = 0, 0.0  # tokens of the slice, and when it was sent

    @property
    def budget(self) -> float:
        """Tokens of a slice."""
        if self._max_pause_s is None:
            return float("inf")
        return FIRST_TOKENS if self._tokens_per_s is None else self._tokens_per_s * self._max_pause_s

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._slice

    def begin(self, tokens: Mapping[K, int]) -> None:
        """After a swap: these wait, with so many tokens each."""
        self._waiting = sorted(((count, key) for key, count in tokens.items()), key=lambda one: one[0], reverse=True)
        self._next()

    def waits(self, key: K) -> bool:
        """Whether it must not be sent yet."""
        return any(key == waiting for _, waiting in self._waiting)

    def runs(self, key: K) -> None:
        """It has its first token, or left: a slice is over with its last one."""
        self._waiting = [one for one in self._waiting if one[1] != key]
        if self._slice.pop(key, None) is None or self._slice:
            return
        tokens, at = self._begun
        self._tokens_per_s = tokens / max(self._clock() - at, 1e-6)
        self._next()

    def _next(self) -> None:
        self._slice, tokens = {}, 0
        while self._waiting and (not self._slice or tokens + self._waiting[-1][0] <= self.budget):
            count, key = self._waiting.pop()
            self._slice[key] = count
            tokens += count
        self._begun = tokens, self._clock()
        self._changed()
