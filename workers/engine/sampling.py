"""From logits to a token, with the same steps and the same random numbers on every backend.

- Order: repetition penalty, temperature, top-k, top-p (over what top-k left); temperature 0: the best token.
- Logprobs are of the untouched logits: raw at temperature 1, processed at the row's own (1 if that is 0).
- Random numbers depend only on (seed, position), a counter-based stream (splitmix64): a redelivered sequence draws
  the same numbers regardless of its batch, and a resumed one continues where it was.
- A token is drawn by inverting the cumulative distribution with one number per row, so probability 0 is never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sluice.pipeline.wire.messages import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Keys = npt.NDArray[np.uint64]


def stream_keys(seeds: list[int]) -> Keys:
    """Stream keys, shape (rows,); any Python int is a seed (taken modulo 2**64)."""
    return _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(keys: Keys, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 in [0, 1 - 2**-52], shape (rows,), for token position `positions[row]` of each stream."""
    counters = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(values: Keys) -> Keys:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def penalise(logits: torch.Tensor, seen: torch.Tensor | None, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive logits of seen tokens by the row's penalty, and multiply negative ones."""
    if seen is None:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """-inf for everything below the row's k-th best; ties with it stay. `top_k` int64 (rows, 1), 1..vocab."""
    best = scores.topk(int(top_k.max()), dim=-1).values
    return scores.masked_fill(scores < best.gather(1, top_k - 1), float("-inf"))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf outside the smallest set of best tokens whose probability reaches top_p; 1 keeps all."""
    probs, order = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return scores.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), float("-inf"))


class Draw(Protocol):
    """Sampling parameters of one row: temperature 0 takes the best token, top_k 0 and top_p 1 are off."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


@dataclass(slots=True)
class DrawTable:
    """Draw parameters of the rows as tensors; None for a step that no row uses."""

    keys: Keys
    temperature: torch.Tensor | None  # float32 (rows, 1); 1 for greedy rows
    top_k: torch.Tensor | None  # int64 (rows, 1), vocabulary size = off
    top_p: torch.Tensor | None  # float32 (rows, 1)

    @classmethod
    def of(cls, rows: Sequence[Draw], seeds: list[int], vocab: int, device: torch.device) -> DrawTable:
        return cls(
            keys=stream_keys(seeds),
            temperature=_column([row.temperature or 1.0 for row in rows], 1.0, device),
            top_k=_column([min(row.top_k or vocab, vocab) for row in rows], vocab, device, torch.int64),
            top_p=_column([row.top_p for row in rows], 1.0, device),
        )

    def draw(self, scores: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """int64 (rows,) from float32 scores (rows, vocab), each with the random number of its token position."""
        if self.temperature is not None:
            scores = scores / self.temperature
        if self.top_k is not None:
            scores = keep_top_k(scores, self.top_k)
        if self.top_p is not None:
            scores = keep_top_p(scores, self.top_p)
        # float64: a float32 sum over 150k probabilities would shift the boundaries between tokens.
        bounds = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
        points = torch.from_numpy(uniforms(self.keys, positions)).to(scores.device).unsqueeze(1)
        drawn = torch.searchsorted(bounds, points * bounds[:, -1:], right=True).squeeze(1)
        return drawn.clamp_(max=scores.shape[1] - 1)  # only NaN rows exceed it, and those fail later


@dataclass(slots=True)
class SamplingTable:
    """Sampling parameters of the rows as tensors; None for a step that no row uses."""

    draws: DrawTable
    positions: npt.NDArray[np.int64]  # (rows,): tokens generated so far
    greedy: torch.Tensor  # bool (rows,)
    penalty: torch.Tensor | None  # float32 (rows, 1)
    seen: torch.Tensor | None  # bool (rows, vocab): tokens in prompt or output, if there is a penalty
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
        """Table for these rows; `contexts` are (prompt, generated) token ids."""
        greedy = [p.temperature == 0 for p in params]
        penalty = _column([p.repetition_penalty for p in params], 1.0, device)
        return cls(
            draws=DrawTable.of(params, seeds, vocab, device),
            positions=np.array([len(generated) for _, generated in contexts], dtype=np.int64),
            greedy=torch.tensor(greedy, device=device),
            penalty=penalty,
            seen=None if penalty is None else _seen(contexts, vocab, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            processed=processed,
        )

    def advance(self, tokens: torch.Tensor) -> None:
        """Record the tokens (rows,) just sampled."""
        self.positions += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)


def sample(
    logits: torch.Tensor, table: SamplingTable, allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64, logprobs float32), each (rows,), from logits float32 (rows, vocab).

    `allowed` (rows, vocab): logits to sample from instead, as changed by plugins; logprobs stay those of `logits`.
    """
    raw = torch.log_softmax(logits, dim=-1)
    scores = raw if allowed is None else allowed
    if table.penalty is not None:
        scores = penalise(logits if allowed is None else allowed, table.seen, table.penalty)
    if table.all_greedy:
        tokens = scores.argmax(dim=-1)
    else:
        tokens = table.draws.draw(scores, table.positions)
        if table.any_greedy:
            tokens = torch.where(table.greedy, scores.argmax(dim=-1), tokens)
    if table.processed and table.draws.temperature is not None:
        raw = torch.log_softmax(logits / table.draws.temperature, dim=-1)
    return tokens, raw.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _column(
    values: list[Any], off: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """(rows, 1), or None if every row has it off."""
    if all(value == off for value in values):
        return None
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _seen(contexts: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int, device: torch.device) -> torch.Tensor:
    seen = torch.zeros(len(contexts), vocab, dtype=torch.bool)
    for row, (prompt, generated) in enumerate(contexts):
        seen[row, [*prompt, *generated]] = True
    return seen.to(device)
