"""When a sequence ends, and what its text is; the one place for it, shared by the backends.

- Order within one token: end-of-sequence ids and stop ids, then stop strings, then length.
- A stop string that is one token acts as a stop id as well; every stop string is also searched in the text.
- A sequence ends at the first token that completes a stop string; that token is kept, nothing after it.
- Stop strings are searched in the text without special tokens, as the cleaned text will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

StopReason = str | int | None
DecodeText = Callable[[Sequence[int]], str]

_MAX_HELD_TOKENS = 8
"""Tokens after which an unfinished character counts as broken bytes; a character has at most 4 bytes."""


def end_reasons(
    tokenizer: Any, eos_token_ids: Iterable[int], stop_token_ids: Iterable[int], stop: Iterable[str]
) -> dict[int, StopReason]:
    """Token id -> the stop reason that it gives: None for end of sequence, the id, or the stop string."""
    reasons: dict[int, StopReason] = {}
    for string in stop:
        token_ids = tokenizer.encode(string, add_special_tokens=False)
        if len(token_ids) == 1 and string in tokenizer.decode(token_ids):  # else it is the unknown token
            reasons[token_ids[0]] = string
    reasons.update((token, token) for token in stop_token_ids)
    reasons.update((token, None) for token in eos_token_ids if token not in reasons)
    return reasons


def text_decoder(tokenizer: Any) -> DecodeText:
    """Token ids -> text without special tokens; the Rust tokenizer directly where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=True)
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


def truncate(text: str, stop: Iterable[str]) -> str:
    """The text before its earliest stop string."""
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]


def final_texts(tokenizer: Any, token_ids: Sequence[int], stop: Iterable[str]) -> tuple[str, str]:
    """(text, raw_text): cleaned, cut at the earliest stop string, stripped; whole with special tokens."""
    text = truncate(tokenizer.decode(token_ids, skip_special_tokens=True), stop)
    return text.strip(), tokenizer.decode(token_ids, skip_special_tokens=False)


class StopStrings:
    """Finds the token that completes a stop string, at a constant cost per token.

    Only tokens since the last whole character are decoded again; of older text just enough characters are
    kept for a stop string that began there.
    """

    def __init__(self, stop: Sequence[str], decode: DecodeText) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._keep = max(map(len, stop)) - 1
        self._tail = ""
        self._window: list[int] = []  # tokens already shown, then those not yet shown
        self._num_shown = 0
        self._shown = ""

    def push(self, token: int) -> str | None:
        """Take the next token; the stop string that it completes (the earliest in the text), or None."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._num_shown
        goes_on = text.endswith("\ufffd") and held < _MAX_HELD_TOKENS  # its last character does, in the next token
        recent = self._tail + (text.rstrip("\ufffd") if goes_on else text)[len(self._shown) :]
        found = [(at, string) for string in self._stop if (at := recent.find(string)) >= 0]
        if found:
            return min(found)[1]
        if goes_on:
            return None
        # The shown tokens stay as left context: many tokenizers drop the space of a first token.
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        self._tail = recent[-self._keep :] if self._keep else ""
        return None
