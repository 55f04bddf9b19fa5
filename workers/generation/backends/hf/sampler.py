"""One batched sampling step with per-row parameters.

- Order: repetition penalty, temperature, top-k, top-p (over what top-k left); temperature 0: the best token.
- The returned logprobs are of the untouched logits: raw at temperature 1, processed at the row's own (1 if it is 0).
- Sampling inverts the cumulative distribution with one number per row, so probability 0 never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.wire.messages import SamplingParams
from workers.generation.noise import Keys, stream_keys, uniforms
from workers.generation.transforms import keep_top_k, keep_top_p, penalise


@dataclass(slots=True)
class SamplingTable:
    """Sampling parameters of the rows as tensors; None where no row asks for the step."""

    keys: Keys
    positions: np.ndarray  # int64 (rows,): tokens generated so far
    greedy: torch.Tensor  # bool (rows,)
    temperature: torch.Tensor | None  # float32 (rows, 1); 1 for greedy rows
    top_k: torch.Tensor | None  # int64 (rows, 1), vocabulary size = off
    top_p: torch.Tensor | None  # float32 (rows, 1)
    penalty: torch.Tensor | None  # float32 (rows, 1)
    seen: torch.Tensor | None  # bool (rows, vocab): tokens in prompt or output, where there is a penalty
    all_greedy: bool
    any_greedy: bool
    processed: bool  # logprobs at the row's temperature

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: list[int],
        contexts: Sequence[tuple[Sequence[int], Sequence[int]]],
        vocab: int,
        device: torch.device,
        *,
        processed: bool = False,
    ) -> SamplingTable:
        """The table of some rows; `contexts` are (prompt, generated) token ids."""

        def column(values: list[Any], off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        greedy = [p.temperature == 0 for p in params]
        penalty = column([p.repetition_penalty for p in params], 1.0)
        return cls(
            keys=stream_keys(seeds),
            positions=np.array([len(generated) for _, generated in contexts], dtype=np.int64),
            greedy=torch.tensor(greedy, device=device),
            temperature=column([p.temperature or 1.0 for p in params], 1.0),
            top_k=column([min(p.top_k or vocab, vocab) for p in params], vocab, torch.int64),
            top_p=column([p.top_p for p in params], 1.0),
            penalty=penalty,
            seen=None if penalty is None else _seen(contexts, vocab, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            processed=processed,
        )

    def advance(self, tokens: torch.Tensor) -> None:
        """Note the tokens (rows,) just sampled."""
        self.positions += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)


def sample(
    logits: torch.Tensor, table: SamplingTable, allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64, logprobs float32), each (rows,), from logits float32 (rows, vocab).

    `allowed` (rows, vocab): what to sample from instead, as plugins changed it; the logprobs stay those of `logits`.
    """
    raw = torch.log_softmax(logits, dim=-1)
    scores = raw if allowed is None else allowed
    if table.penalty is not None:
        scores = penalise(logits if allowed is None else allowed, table.seen, table.penalty)
    if table.all_greedy:
        tokens = scores.argmax(dim=-1)
    else:
        tokens = _draw(_truncated(scores, table), table)
        if table.any_greedy:
            tokens = torch.where(table.greedy, scores.argmax(dim=-1), tokens)
    if table.processed and table.temperature is not None:
        raw = torch.log_softmax(logits / table.temperature, dim=-1)
    return tokens, raw.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncated(scores: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    if table.temperature is not None:
        scores = scores / table.temperature
    if table.top_k is not None:
        scores = keep_top_k(scores, table.top_k)
    if table.top_p is not None:
        scores = keep_top_p(scores, table.top_p)
    return scores


def _draw(scores: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    # float64: a sum over 150k probabilities in float32 would move the borders between tokens.
    bounds = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    points = torch.from_numpy(uniforms(table.keys, table.positions)).to(scores.device).unsqueeze(1)
    drawn = torch.searchsorted(bounds, points * bounds[:, -1:], right=True).squeeze(1)
    return drawn.clamp_(max=scores.shape[1] - 1)  # only NaN rows are beyond it, and those are failed later


def _seen(contexts: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int, device: torch.device) -> torch.Tensor:
    seen = torch.zeros(len(contexts), vocab, dtype=torch.bool)
    for row, (prompt, generated) in enumerate(contexts):
        seen[row, [*prompt, *generated]] = True
    return seen.to(device)
