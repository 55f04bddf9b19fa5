"""Keeps a sequence from writing a JSON object that it has already written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from pipeline.errors import EngineError
from workers.generation.plugins.base import GenerationPlugin
from workers.generation.plugins.closing_tokens import ClosingTokens, Tokens
from workers.generation.plugins.json_scanner import squeeze
from workers.generation.plugins.object_log import ObjectLog
from workers.generation.plugins.text_window import TextWindow, decoder


class DuplicateObjectSuppression(GenerationPlugin):
    """Forbids the tokens that would complete a JSON object equal to an earlier sibling, and no others.

    - Guaranteed: no two complete objects directly inside the same array, or as values of the same object, have equal
      text, white space outside of strings aside. Exempt are sequences of `num_given_up` and what `max_objects` forgot.
    - Objects that differ in one character of a string, number or key, or in the order of keys, are different, and
      neither is held back; no meaning is read into them. Top-level values are not compared with one another, nor are
      objects in different arrays or objects. Special tokens count as text.
    - Only the token with the closing brace is forbidden: the model may still go on with the object in another way.
    - Work per token: its characters, one comparison for each earlier sibling that begins as the open object does, and
      a trial of each distinct text with which a token can end one of them. The vocabulary is read once per tokenizer,
      which takes some 0.4 s for 150,000 tokens.
    - Where every token that may still be sampled is forbidden the scores stay as they are, and `num_given_up` grows.
    """

    name = "duplicate_objects"
    backends = frozenset({"hf"})
    hooks = frozenset({"logits_processor"})

    def __init__(self, max_objects: int | None = None) -> None:
        """`max_objects`: objects remembered of each array or object, the newest; None = all.

        Raises EngineError if it is below 1.
        """
        if max_objects is not None and max_objects < 1:
            raise EngineError(f"plugin {self.name!r}: max_objects={max_objects}; give 1 or more, or None for all")
        self.max_objects = max_objects
        self.num_given_up = 0  # steps of all sequences that had no other token

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[LogitsProcessor]:
        window = TextWindow(prompt_len, decoder(tokenizer, special_tokens=True))
        closing = ClosingTokens.of(tokenizer)
        return [_NoRepeatedObject(self, window, ObjectLog(self.max_objects, closing.objects), closing)]


class _NoRepeatedObject(LogitsProcessor):
    """Reads each token once."""

    def __init__(
        self, plugin: DuplicateObjectSuppression, window: TextWindow, log: ObjectLog, closing: ClosingTokens
    ) -> None:
        self._plugin = plugin
        self._window = window
        self._log = log
        self._closing = closing

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (1, vocab) with -inf for the tokens that repeat an object, given `input_ids` (1, prompt + generated).

        The given scores are not changed.
        """
        self._log.feed(self._window.take(input_ids))
        forbidden = sorted({token for token in self._forbidden() if token < scores.shape[-1]})
        if not forbidden:
            return scores
        left = scores.index_fill(-1, torch.tensor(forbidden, device=scores.device), float("-inf"))
        if bool(torch.isneginf(left).all()):
            self._plugin.num_given_up += 1
            return scores
        return left

    def _forbidden(self) -> Iterator[int]:
        pending = self._window.pending()
        for tokens in self._suspects(pending):
            for text, token_ids in tokens.items():
                if self._log.repeats_with(pending + text):
                    yield from token_ids
        yield from (t for t in self._closing.unclear if self._log.repeats_with(self._window.peek(t)))

    def _suspects(self, pending: str) -> Iterator[Tokens]:
        """Tokens, by text, among which are all that repeat an object."""
        yield self._closing.repeats
        rests = self._log.unfinished(len(pending) + self._closing.max_chars)
        for rest in {squeeze(rest.removeprefix(pending)) for rest in rests}:
            yield self._closing.ends.get(rest, {})
        for key in self._log.watched():
            yield self._closing.objects[key]
