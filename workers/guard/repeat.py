"""The rule that ends a looping sequence: pure, torch-free, a constant cost per token.

- Only generated tokens are pushed: no prompt, no padding; every id, 0 included, is a token.
- State grows from the first token on; nothing triggers while fewer than `min_new_tokens` have been pushed.
- Order: object_keys, consecutive, ngram. A state that triggers triggers again until the sequence changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config.types import RepeatTerminateConfig

Rule = Literal["object_keys", "consecutive", "ngram"]
OFF = 1 << 62
"""A count that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class RepeatTrigger:
    """Why a sequence is ended; `at_token` tokens were generated before the end-of-sequence id that is forced."""

    rule: Rule
    at_token: int


class RepeatGuard:
    """Watches one sequence.

    `key_pattern`: the token ids of `object_key_prefix`; needed where `max_object_keys` is set.
    """

    __slots__ = (
        "_at", "_block", "_borders", "_consecutive", "_keys", "_last", "_matched", "_max_keys",
        "_min", "_needed", "_pattern", "_recent", "_run", "_same", "length", "trigger",
    )  # fmt: skip

    def __init__(self, config: RepeatTerminateConfig, key_pattern: Sequence[int] = ()) -> None:
        self.length = 0  # tokens pushed
        self.trigger: RepeatTrigger | None = None  # of the newest token
        self._min = config.min_new_tokens
        run, size, repeats, keys = (
            config.max_consecutive_token_repeats,
            config.ngram_size,
            config.ngram_repeats,
            config.max_object_keys,
        )
        self._consecutive = run if run is not None and run > 0 else OFF
        self._last, self._run = -1, 0
        self._block = size if size is not None and size > 0 and repeats >= 2 else 0
        self._needed = self._block * (repeats - 1) if self._block else OFF
        self._recent = [-1] * self._block  # ring: the token `_block` positions ago is at `_at`
        self._at, self._same = 0, 0  # _same: length of the run of positions with tok[i] == tok[i - block]
        self._max_keys = keys if keys is not None else OFF
        self._pattern = tuple(key_pattern) if keys is not None else ()
        self._borders = _borders(self._pattern)
        self._matched, self._keys = 0, 0

    def push(self, token: int) -> RepeatTrigger | None:
        """Take the next generated token; the trigger if the sequence is to end after it."""
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
        if self._pattern:
            self._count_key(token)
        fires = self._keys >= self._max_keys or self._run >= self._consecutive or self._same >= self._needed
        self.trigger = self._found() if fires and self.length >= self._min else None
        return self.trigger

    def push_all(self, tokens: Iterable[int]) -> RepeatTrigger | None:
        """Take several tokens; the trigger after the last one, whatever happened before it."""
        for token in tokens:
            self.push(token)
        return self.trigger

    def _count_key(self, token: int) -> None:
        """Occurrences from left to right, none overlapping: a full match starts from nothing again."""
        matched = self._matched
        while matched and self._pattern[matched] != token:
            matched = self._borders[matched - 1]
        if self._pattern[matched] == token:
            matched += 1
        if matched == len(self._pattern):
            self._keys += 1
            matched = 0
        self._matched = matched

    def _found(self) -> RepeatTrigger:
        if self._keys >= self._max_keys:
            return RepeatTrigger("object_keys", self.length)
        return RepeatTrigger("consecutive" if self._run >= self._consecutive else "ngram", self.length)


def _borders(pattern: Sequence[int]) -> tuple[int, ...]:
    """For each beginning of the pattern, the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    borders = [0] * len(pattern)
    for at in range(1, len(pattern)):
        length = borders[at - 1]
        while length and pattern[length] != pattern[at]:
            length = borders[length - 1]
        borders[at] = length + 1 if pattern[length] == pattern[at] else 0
    return tuple(borders)
