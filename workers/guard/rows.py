"""Logits rows in which one token is left; the one thing that the adapters do to an engine's numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def force(logits: torch.Tensor, tokens: Mapping[int, int]) -> torch.Tensor:
    """Row r of `logits` (rows, vocab) becomes -inf but for 0 at `tokens[r]`, in place; all other rows stay as they are.

    `tokens` must not be empty. Returns `logits`.
    """
    rows = torch.tensor(list(tokens), device=logits.device)
    chosen = torch.tensor(list(tokens.values()), device=logits.device)
    logits[rows] = float("-inf")
    logits[rows, chosen] = 0.0
    return logits
