"""Ends a sequence where its first JSON value closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from sluice.pipeline.errors import EngineError
from sluice.workers.engine.plugins.base import GenerationPlugin, TextWindow, decoder
from sluice.workers.engine.plugins.json_scanner import BRACKETS, JsonScanner


class BalancedJsonStop(GenerationPlugin):
    """Ends the sequence at the token that closes the first JSON object or array that began in the generated text.

    - Only brackets and strings are tracked: balanced text that isn't JSON, such as `[sic]`, also ends the sequence.
      `begins="{"` lets only an object begin a value, for answers with brackets in their prose.
    - Text before the value stays. If a token holds characters after the closing bracket, they stay in `raw_text` and in
      the tokens; `text` is cut after the bracket.
    - Special tokens don't count as text. A sequence in which no value closes is left unchanged.
    """

    name = "balanced_json"
    backends = frozenset({"hf"})
    hooks = frozenset({"stopping_criteria"})

    def __init__(self, begins: str = BRACKETS) -> None:
        """`begins`: `{`, `[` or both. Raises EngineError for anything else."""
        if not begins or not set(begins) <= set(BRACKETS):
            raise EngineError(f"plugin {self.name!r}: begins={begins!r}; give '{{', '[' or both")
        self.begins = begins

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[StoppingCriteria]:
        window = TextWindow(prompt_len, decoder(tokenizer, special_tokens=False))
        return [_ValueCloses(window, JsonScanner(self.begins))]

    def clean_text(self, text: str) -> str:
        """The text up to the bracket that closes its first value; all of it if none closes."""
        return text[: JsonScanner(self.begins).end_of_value(text)]


class _ValueCloses(StoppingCriteria):
    """True from the token that closes the first value; reads each token once."""

    def __init__(self, window: TextWindow, scanner: JsonScanner) -> None:
        self._window = window
        self._scanner = scanner
        self._closed = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """bool (1,) for `input_ids` (1, prompt + generated)."""
        text = self._window.take(input_ids)
        self._closed = self._closed or self._scanner.end_of_value(text) is not None
        return torch.tensor([self._closed], device=input_ids.device)
