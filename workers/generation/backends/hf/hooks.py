"""The plugin hooks of one sequence: real transformers objects, called for it alone and without padding.

A hook that raises ends its own sequence and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.errors import RequestError
from workers.generation.plugins.base import GenerationPlugin


class RowHooks:
    """Stopping criteria and logits processors of one sequence, and its token ids as they take them."""

    def __init__(
        self, plugins: Sequence[GenerationPlugin], prompt: Sequence[int], tokenizer: Any, device: torch.device
    ) -> None:
        self._ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)  # (1, prompt + generated)
        self._criteria: list[tuple[str, Any]] = []
        self._processors: list[tuple[str, Any]] = []
        for plugin in plugins:
            name = plugin.name or type(plugin).__name__
            try:
                criteria = list(plugin.stopping_criteria(len(prompt), tokenizer))
                processors = list(plugin.logits_processors(len(prompt), tokenizer))
            except Exception as error:
                raise _failed(name, error) from error
            self._criteria += [(name, one) for one in criteria]
            self._processors += [(name, one) for one in processors]

    def take(self, token: int) -> None:
        """The next token of the sequence."""
        new = torch.tensor([[token]], dtype=torch.int64, device=self._ids.device)
        self._ids = torch.cat([self._ids, new], dim=1)

    def stops(self, logits: torch.Tensor) -> str | None:
        """Name of the plugin that ends the sequence here; `logits` (vocab,) are those of its newest token."""
        for name, criterion in self._criteria:
            try:
                if bool(torch.as_tensor(criterion(self._ids, logits.unsqueeze(0))).all()):
                    return name
            except Exception as error:
                raise _failed(name, error) from error
        return None

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (vocab,) to sample from; the given ones are not changed."""
        if bool(logits.isnan().any()):
            return logits  # the model's fault, which the row will name
        scores = logits.unsqueeze(0).clone() if self._processors else logits.unsqueeze(0)
        for name, processor in self._processors:
            try:
                scores = processor(self._ids, scores)
                if scores.shape != (1, len(logits)) or not bool((scores > float("-inf")).any()):
                    raise ValueError(f"it must leave a token to sample, in shape (1, {len(logits)})")
            except Exception as error:
                raise _failed(name, error) from error
        return scores[0]


def _failed(name: str, error: Exception) -> RequestError:
    return RequestError(f"plugin {name!r} failed: {error!r}; mend it or leave it out")
