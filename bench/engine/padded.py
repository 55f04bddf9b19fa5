"""transformers' `generate`: all sequences in one left-padded batch, which runs until its longest has ended.

- Its rows cannot end on their own count: each is cut to its length afterwards, so only useful tokens count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.bench.engine.load import Ask


class Padded:
    """One of the sides."""

    def __init__(self, model: Path) -> None:
        self._module = load_module(model)

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The new tokens of each sequence."""
        import torch

        pad, width = self._module.config.pad_token_id, max(len(ask.prompt) for ask in asks)
        rows = torch.tensor([[pad] * (width - len(ask.prompt)) + list(ask.prompt) for ask in asks])
        starts = torch.tensor([width - len(ask.prompt) for ask in asks])
        mask = (torch.arange(width) >= starts.unsqueeze(1)).long()
        found = self._module.generate(
            rows.to(self._module.device),
            attention_mask=mask.to(self._module.device),
            max_new_tokens=max(ask.num_new_tokens for ask in asks),
            do_sample=False,
        )
        new = found[:, width:].tolist()
        return [tokens[: ask.num_new_tokens] for tokens, ask in zip(new, asks, strict=True)]

    def close(self) -> None:
        """Nothing to end."""


def load_module(model: Path) -> Any:
    """As a user loads it: float32, `sdpa` attention."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.to(device).eval()
