"""Forward passes over new columns of a cache, and the logprobs of given tokens that they yield.

- Logits are asked for only where they are used; a pass that would hold too many is cut into pieces.
- Prefill and scoring use the same passes, so there is one definition of a logprob.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Cache

from sluice.workers.engine.hf.cache import PrefillCache
from sluice.workers.engine.hf.model import LoadedModel

SCORED_LOGITS = 1 << 26
"""Logits held at a time while tokens are scored; bounds the memory of a prefill."""


def forward(
    model: LoadedModel,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    keep: int = 1,
    **image: torch.Tensor,
) -> torch.Tensor:
    """float32 logits of the last `keep` positions, (rows, keep, vocab).

    `inputs` (rows, new), `mask` (rows, cached + new), `positions` (rows, new) or (3, rows, new).
    """
    if model.rope_index is not None and positions.ndim == 2:
        positions = positions.expand(3, *positions.shape)
    last: dict[str, Any] = {"logits_to_keep": keep} if model.keeps_last_logits else {}
    output = model.module(
        input_ids=inputs,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **image,
        **last,
    )
    return output.logits[:, -keep:].float()


def forward_scored(
    model: LoadedModel,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    first: int | None,
    temperatures: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 logits of the last position (rows, vocab), logprobs of `inputs[:, first:]` (rows, new - first)).

    `first` > 0 is the first column to score, given all before it; None: no column. `temperatures` (rows,): of the
    logprobs; empty: 1.
    """
    columns = inputs.shape[1]
    before = mask.shape[1] - columns
    begin = columns - 1 if first is None else first - 1  # the logits of a column are at the one before it
    # Two at least: for a single column transformers takes no padding out of layers that keep a state. The last column
    # of a row is never padding.
    size = max(2, SCORED_LOGITS // (inputs.shape[0] * model.facts.vocab_size))
    start, scores = 0, [inputs.new_empty((inputs.shape[0], 0), dtype=torch.float32)]
    while True:
        end = min(begin + size, columns)
        here = slice(start, end)
        logits = forward(model, inputs[:, here], mask[:, : before + end], positions[:, here], cache, keep=end - begin)
        scores.append(chosen(logits, inputs[:, begin + 1 : end + 1], temperatures))
        if end == columns:
            return logits[:, -1], torch.cat(scores, dim=1)
        start = begin = end


def chosen(logits: torch.Tensor, tokens: torch.Tensor, temperatures: Sequence[float] = ()) -> torch.Tensor:
    """Logprobs float32 (rows, n) of `tokens` (rows, n) by the first n of `logits` (rows, >= n, vocab)."""
    logits = logits[:, : tokens.shape[1]]
    if any(temperature != 1 for temperature in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None, None]
    return logits.gather(2, tokens.unsqueeze(2)).squeeze(2) - logits.logsumexp(dim=2)


@torch.inference_mode()
def token_logprobs(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    firsts: Sequence[int],
    pass_tokens: int,
    temperatures: Sequence[float] = (),
) -> list[list[float]]:
    """Logprobs (nats, computed in fp32) of `sequences[i][firsts[i]:]`, each token given all before it.

    `firsts[i]` >= 1. `temperatures`: one for each sequence; empty: 1. A pass has at most `pass_tokens` padded tokens,
    or one sequence; text only.
    """
    if not all(1 <= first < len(sequence) for sequence, first in zip(sequences, firsts, strict=True)):
        raise ValueError("every sequence needs a token before the first one that is scored, and one to score")
    found: list[list[float]] = [[] for _ in sequences]
    heats = temperatures or [1.0] * len(sequences)
    for rows in _passes([len(sequence) for sequence in sequences], pass_tokens):
        chosen = [sequences[row] for row in rows]
        scores, begin = _scored(model, chosen, [firsts[row] for row in rows], [heats[row] for row in rows])
        for row, start, logprobs in zip(rows, begin, scores, strict=True):
            found[row] = logprobs[start:]
    return found


def _scored(
    model: LoadedModel, sequences: Sequence[Sequence[int]], firsts: Sequence[int], temperatures: Sequence[float]
) -> tuple[list[list[float]], list[int]]:
    """(Scores of the last columns, where in them each row's own begin); all rows end at the last column."""
    device = torch.device(model.facts.device)
    width = max(map(len, sequences))
    padded = [[model.pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    inputs = torch.tensor(padded, device=device)
    starts = [width - len(sequence) for sequence in sequences]
    mask = torch.arange(width, device=device) >= torch.tensor(starts, device=device).unsqueeze(1)
    positions = (mask.cumsum(dim=-1) - 1).clamp_(min=0)
    columns = [start + first for start, first in zip(starts, firsts, strict=True)]
    first = min(columns)
    _, scores = forward_scored(model, inputs, mask, positions, PrefillCache(model.module.config), first, temperatures)
    return scores.tolist(), [column - first for column in columns]


def _passes(lengths: Sequence[int], pass_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        if rows and lengths[rows[0]] * (len(rows) + 1) > pass_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
