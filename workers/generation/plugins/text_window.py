"""The generated text of one sequence, piece by piece, at a constant cost per token.

- The pieces, one after the other, are the text; an unfinished character at the end is kept back, nothing before it.
- Only the tokens since the last whole character are decoded again, with those before them as left context: many
  tokenizers drop the space of a first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.errors import EngineError

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"
_MAX_HELD_TOKENS = 64
"""Tokens in a row that end inside a character before what they hold is given out as it is: broken bytes."""


def decoder(tokenizer: Any, *, special_tokens: bool) -> Decode:
    """Token ids -> text, with or without special tokens, and with no white space tidied up."""
    backend, skip = getattr(tokenizer, "backend_tokenizer", None), not special_tokens
    if backend is not None:
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=skip)
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


class TextWindow:
    """Takes the `input_ids` of a hook and gives the text that is new in them; the prompt never counts."""

    __slots__ = ("_decode", "_num_context", "_num_given", "_num_taken", "_window")

    def __init__(self, prompt_len: int, decode: Decode) -> None:
        self._decode = decode
        self._num_taken = prompt_len
        self._window: list[int] = []  # left context, then what may end inside a character
        self._num_context = 0
        self._num_given = 0  # characters of the window's text

    def take(self, input_ids: Any) -> str:
        """The new text of `input_ids` (1, prompt + generated) int64.

        Raises EngineError if these are not the ids of the same sequence, gone on.
        """
        num_rows, num_ids = input_ids.shape
        if num_rows != 1 or num_ids < self._num_taken:
            raise EngineError(
                f"a plugin's hook saw {self._num_taken} tokens of one sequence and was then called with {num_rows} x "
                f"{num_ids}; hooks hold the state of a sequence: ask the plugin for new ones for each"
            )
        new = input_ids[0, self._num_taken :].tolist()
        self._num_taken = num_ids
        return "".join(map(self.push, new))

    def push(self, token: int) -> str:
        """Take the next token; the text that it finishes."""
        self._window.append(token)
        text = self._decode(self._window)
        overdue = len(self._window) - self._num_context >= _MAX_HELD_TOKENS
        num_whole = len(text if overdue else text.rstrip(_BROKEN))
        piece = text[self._num_given : num_whole]
        self._num_given = max(self._num_given, num_whole)
        if num_whole == len(text) and (piece or overdue):  # tokens without text are no left context
            self._window = self._window[self._num_context :][-_MAX_HELD_TOKENS:]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return piece

    def pending(self) -> str:
        """What is kept back, as it reads if no token goes on with it: U+FFFD, or nothing."""
        if len(self._window) == self._num_context:
            return ""
        return self._decode(self._window)[self._num_given :]

    def peek(self, token: int) -> str:
        """The text after what was given out if `token` came next; may end with U+FFFD for an unfinished character."""
        return self._decode([*self._window, token])[self._num_given :]
