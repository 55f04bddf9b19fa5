"""Forward passes of the model over new columns of a cache, and the logprobs that they give on the way.

- Logits are asked for where they are used alone; a pass that would hold too many is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from workers.generation.backends.hf.model import LoadedModel

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
