"""From logits to a token, with the same steps and the same random numbers on every backend.

- Order, as in vLLM: constraints (constraints.py), penalties, temperature, min-p, top-k, top-p (over what top-k left);
  temperature 0: the best token.
- Logprobs are of the untouched logits: raw at temperature 1, processed at the row's own (1 if that is 0). They are
  computed only where a row asks for them, and nothing is drawn from them.
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
from sluice.pipeline.wire.sampled_tokens import Place

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


@dataclass(slots=True)
class Penalties:
    """Penalties of the rows as tensors; None for one that no row has."""

    repetition: torch.Tensor | None  # float32 (rows, 1)
    presence: torch.Tensor | None  # float32 (rows, 1)
    frequency: torch.Tensor | None  # float32 (rows, 1)
    seen: torch.Tensor | None  # bool (rows, vocab): in prompt or answer
    counts: torch.Tensor | None  # float32 (rows, vocab): how often in the answer

    @classmethod
    def of(
        cls,
        rows: Sequence[Penalised],
        contexts: Sequence[tuple[Sequence[int], Sequence[int]]],
        vocab: int,
        device: torch.device,
    ) -> Penalties | None:
        """`contexts` are (prompt, generated) token ids. None if no row has a penalty."""
        repetition = _column([row.repetition_penalty for row in rows], 1.0, device)
        presence = _column([row.presence_penalty for row in rows], 0.0, device)
        frequency = _column([row.frequency_penalty for row in rows], 0.0, device)
        by_count = presence is not None or frequency is not None
        if repetition is None and not by_count:
            return None
        seen = None if repetition is None else _seen(contexts, vocab, device)
        return cls(repetition, presence, frequency, seen, _counts(contexts, vocab, device) if by_count else None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Seen tokens: positive logits are divided by the repetition penalty, negative ones multiplied; then less the
        other two. Returns new logits.
        """
        if self.repetition is not None and self.seen is not None:
            lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(self.seen, lower, logits)
        if self.frequency is not None and self.counts is not None:
            logits = logits - self.frequency * self.counts
        if self.presence is not None and self.counts is not None:
            logits = logits - self.presence * (self.counts > 0)
        return logits

    def advance(self, tokens: torch.Tensor) -> None:
        """Record the tokens (rows,) just sampled."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(self.counts[:, :1]))


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """-inf for every token whose probability is below `min_p` (rows, 1) times that of the row's best."""
    probs = torch.softmax(scores, dim=-1)
    return scores.masked_fill(probs < probs.amax(dim=-1, keepdim=True) * min_p, float("-inf"))


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
    """Sampling parameters of one row: temperature 0 takes the best token; min_p 0, top_k 0 and top_p 1 are off."""

    @property
    def temperature(self) -> float: ...

    @property
    def min_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


class Penalised(Protocol):
    """Penalties of one row; 1 is off for the first, 0 for the others."""

    @property
    def repetition_penalty(self) -> float: ...

    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...


@dataclass(slots=True)
class DrawTable:
    """Draw parameters of the rows as tensors; None for a step that no row uses."""

    keys: Keys
    temperature: torch.Tensor | None  # float32 (rows, 1); 1 for greedy rows
    min_p: torch.Tensor | None  # float32 (rows, 1)
    top_k: torch.Tensor | None  # int64 (rows, 1), vocabulary size = off
    top_p: torch.Tensor | None  # float32 (rows, 1)

    @classmethod
    def of(cls, rows: Sequence[Draw], seeds: list[int], vocab: int, device: torch.device) -> DrawTable:
        return cls(
            keys=stream_keys(seeds),
            temperature=_column([row.temperature or 1.0 for row in rows], 1.0, device),
            min_p=_column([row.min_p for row in rows], 0.0, device),
            top_k=_column([min(row.top_k or vocab, vocab) for row in rows], vocab, device, torch.int64),
            top_p=_column([row.top_p for row in rows], 1.0, device),
        )

    def draw(self, scores: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """int64 (rows,) from float32 scores (rows, vocab), each with the random number of its token position."""
        if self.temperature is not None:
            scores = scores / self.temperature
        if self.min_p is not None:
            scores = keep_min_p(scores, self.min_p)
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
    penalties: Penalties | None
    all_greedy: bool
    any_greedy: bool
    processed: bool  # logprobs at the row's temperature
    scored: bool  # some row has logprobs

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
        return cls(
            draws=DrawTable.of(params, seeds, vocab, device),
            positions=np.array([len(generated) for _, generated in contexts], dtype=np.int64),
            greedy=torch.tensor(greedy, device=device),
            penalties=Penalties.of(params, contexts, vocab, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            processed=processed,
            scored=any(p.logprobs for p in params),
        )

    def advance(self, tokens: torch.Tensor) -> None:
        """Record the tokens (rows,) just sampled."""
        self.positions += 1
        if self.penalties is not None:
            self.penalties.advance(tokens)


def sample(
    logits: torch.Tensor, table: SamplingTable, allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64, logprobs float32), each (rows,), from logits float32 (rows, vocab).

    `allowed` (rows, vocab): logits to sample from instead, as changed by plugins; logprobs stay those of `logits`.
    Where no row asks for logprobs they are 0, and NaN all the same for logits that aren't finite.
    """
    scores = logits if allowed is None else allowed
    if table.penalties is not None:
        scores = table.penalties.apply(scores)
    if table.all_greedy:
        tokens = scores.argmax(dim=-1)
    else:
        tokens = table.draws.draw(scores, table.positions)
        if table.any_greedy:
            tokens = torch.where(table.greedy, scores.argmax(dim=-1), tokens)
    if not table.scored:
        best = logits.amax(dim=-1)
        return tokens, best - best
    if table.processed and table.draws.temperature is not None:
        logits = logits / table.draws.temperature
    raw = torch.log_softmax(logits, dim=-1)
    return tokens, raw.gather(1, tokens.unsqueeze(1)).squeeze(1)


def places_of(logprobs: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Place]:
    """The place of `tokens[i]` in row i of the logprobs (rows, vocab), with the row's `counts[i]` likeliest tokens."""
    chosen = logprobs.gather(1, torch.tensor(list(tokens), device=logprobs.device).unsqueeze(1))
    ranks = (logprobs >= chosen).sum(dim=1).tolist()
    best = logprobs.topk(min(max(counts, default=0), logprobs.shape[1]), dim=1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [Place(ranks[row], tuple(ids[row][:count]), tuple(values[row][:count])) for row, count in enumerate(counts)]


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


def _counts(contexts: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int, device: torch.device) -> torch.Tensor:
    counts = torch.zeros(len(contexts), vocab)
    for row, (_, generated) in enumerate(contexts):
        counts[row] = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=vocab)
    return counts.to(device)
