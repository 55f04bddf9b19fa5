"""What a plugin declares, and the check that it fits before anything is decoded; torch-free.

- A plugin declares where it works (backends, request types) and which hooks it uses; nothing is tried out.
- Hooks are created anew for each sequence: they may hold state and are called for that sequence alone, without
  padding: `input_ids` (1, prompt + generated) int64 and `scores` (1, vocabulary) fp32, as in transformers.
- A logits processor changes what is sampled; the reported logprobs stay those of the untouched logits.

`TextWindow` gives a plugin the generated text in pieces, at a constant cost per token:

- The pieces concatenate to the text; only an unfinished character at the end is held back.
- Only the tokens since the last whole character are decoded again, with the previous ones as left context: many
  tokenizers drop the space of a first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

from sluice.pipeline.errors import EngineError

Hook = Literal["stopping_criteria", "logits_processor"]
RequestType = Literal["text", "vlm"]
Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"
_MAX_HELD_TOKENS = 64
"""Tokens in a row that end inside a character before what they hold is given out as it is: broken bytes."""


class GenerationPlugin:
    """Base of plugins; override what `hooks` names, and `clean_text` to trim the text."""

    name: ClassVar[str] = ""
    backends: ClassVar[frozenset[str]] = frozenset({"hf", "vllm"})
    request_types: ClassVar[frozenset[RequestType]] = frozenset({"text", "vlm"})
    hooks: ClassVar[frozenset[Hook]] = frozenset()

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        """`transformers.StoppingCriteria` objects for one sequence; its unpadded prompt has `prompt_len` tokens."""
        return ()

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        """`transformers.LogitsProcessor` objects for one sequence."""
        return ()

    def clean_text(self, text: str) -> str:
        """The cleaned text, after stop strings were cut and white space stripped."""
        return text


def check_plugins(
    plugins: Iterable[GenerationPlugin], *, backend: str, hooks: frozenset[Hook], request_type: RequestType
) -> None:
    """Raise EngineError for a plugin that `backend`, with these `hooks`, or this type of request can't serve."""
    for plugin in plugins:
        name = plugin.name or type(plugin).__name__
        if backend not in plugin.backends:
            raise EngineError(
                f"plugin {name!r} works on {', '.join(sorted(plugin.backends))}, but the backend is {backend!r}; "
                "choose that backend or remove the plugin"
            )
        if missing := sorted(plugin.hooks - hooks):
            raise EngineError(
                f"plugin {name!r} needs the hooks {', '.join(missing)}, which the {backend!r} backend does not call; "
                "use the hf backend or remove the plugin"
            )
        if request_type not in plugin.request_types:
            raise EngineError(
                f"plugin {name!r} is for {', '.join(sorted(plugin.request_types))} requests, but these are "
                f"{request_type}; remove it"
            )


def decoder(tokenizer: Any, *, special_tokens: bool) -> Decode:
    """Token ids -> text, with or without special tokens; white space isn't cleaned up."""
    backend, skip = getattr(tokenizer, "backend_tokenizer", None), not special_tokens
    if backend is not None:
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=skip)
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


class TextWindow:
    """Takes a hook's `input_ids` and returns the new text in them; the prompt never counts."""

    __slots__ = ("_decode", "_num_context", "_num_given", "_num_taken", "_window")

    def __init__(self, prompt_len: int, decode: Decode) -> None:
        self._decode = decode
        self._num_taken = prompt_len
        self._window: list[int] = []  # left context, then tokens that may end inside a character
        self._num_context = 0
        self._num_given = 0  # characters of the window's text already returned

    def take(self, input_ids: Any) -> str:
        """The new text of `input_ids` (1, prompt + generated) int64.

        Raises EngineError if these ids don't continue the same sequence.
        """
        num_rows, num_ids = input_ids.shape
        if num_rows != 1 or num_ids < self._num_taken:
            raise EngineError(
                f"a plugin's hook saw {self._num_taken} tokens of one sequence and was then called with {num_rows} x "
                f"{num_ids}; hooks hold the state of one sequence: get new ones from the plugin for each"
            )
        new = input_ids[0, self._num_taken :].tolist()
        self._num_taken = num_ids
        return "".join(map(self.push, new))

    def push(self, token: int) -> str:
        """Take the next token; the text it completes."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._num_context
        if held == 1 and self._num_context and len(text) == self._num_given and not text.endswith(BROKEN):
            self._window.pop()  # a special token: it is no left context
            return ""
        overdue = held >= _MAX_HELD_TOKENS
        num_whole = len(text if overdue else text.rstrip(BROKEN))
        piece = text[self._num_given : num_whole]
        self._num_given = max(self._num_given, num_whole)
        if num_whole == len(text) and (piece or overdue):  # tokens without text are no left context
            self._window = self._window[self._num_context :][-_MAX_HELD_TOKENS:]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return piece

    def pending(self) -> str:
        """What is held back, decoded as if no token completed it: U+FFFD, or nothing."""
        if len(self._window) == self._num_context:
            return ""
        return self._decode(self._window)[self._num_given :]

    def peek(self, token: int) -> str:
        """The text after what was returned if `token` came next; may end with U+FFFD for an unfinished character."""
        return self._decode([*self._window, token])[self._num_given :]
