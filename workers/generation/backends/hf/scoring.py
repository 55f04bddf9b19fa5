"""Logprobs of given tokens, by the passes that also prefill (passes.py): one definition for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.generation.backends.hf.cache import PrefillCache
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.backends.hf.passes import forward_scored


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
        scores, begin = _pass(model, chosen, [firsts[row] for row in rows], [heats[row] for row in rows])
        for row, start, logprobs in zip(rows, begin, scores, strict=True):
            found[row] = logprobs[start:]
    return found


def _pass(
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
