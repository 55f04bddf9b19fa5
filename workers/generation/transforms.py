"""The steps between logits and a distribution to draw from, the same on every backend."""

from __future__ import annotations

import torch


def penalise(logits: torch.Tensor, seen: torch.Tensor | None, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of seen tokens by the row's penalty."""
    if seen is None:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """-inf for what is below the row's k-th best; ties with it stay. `top_k` int64 (rows, 1), 1..vocab."""
    best = scores.topk(int(top_k.max()), dim=-1).values
    return scores.masked_fill(scores < best.gather(1, top_k - 1), float("-inf"))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf outside the smallest set of best tokens whose probability reaches top_p; 1 keeps all."""
    probs, order = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return scores.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), float("-inf"))
