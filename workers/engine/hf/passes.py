"""Forward passes over new columns of a cache, and the logprobs they give for known tokens.

- Logits are computed only where they are used; a pass that would hold too many is split into pieces.
- Prefill and scoring use the same passes, so a logprob is defined only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Cache

from sluice.pipeline.wire.sampled_tokens import Place, Ranked
from sluice.workers.engine.contracts import check_scored
from sluice.workers.engine.hf.cache import PrefillCache
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.sampling import places_of

SCORED_LOGITS = 1 << 26
"""Logits held at a time while tokens are scored; bounds the memory of a prefill."""


def forward(
    model: LoadedModel,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    keep: int = 1,
    **images: Any,
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
        **images,
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

    `first` > 0 is the first column to score, given all before it; None: no column. `temperatures` (rows,) apply to the
    logprobs; empty: 1.
    """
    columns = inputs.shape[1]
    before = mask.shape[1] - columns
    begin = columns - 1 if first is None else first - 1  # the logits of a column come from the one before it
    # At least two: for a single column, transformers doesn't mask padding out of layers with a state. A row's last
    # column is never padding.
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


def summed_logprob(model: LoadedModel, token_ids: Sequence[int]) -> float:
    """Of tokens 1.. given their prefix, in fp32 nats, by one plain pass. Raises RequestError."""
    check_scored(token_ids, model.facts)
    inputs = torch.tensor([list(token_ids)], device=torch.device(model.facts.device))
    logits = model.module(input_ids=inputs, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, inputs[0, 1:, None]).double().sum().item()


def prompt_ranked(model: LoadedModel, token_ids: Sequence[int], count: int, temperature: float = 1.0) -> Ranked:
    """Logprobs and places of tokens 1.., with `count` alternatives each, by one pass over one row."""
    padded, cache = left_padded(model, [token_ids]), PrefillCache(model.module.config)
    inputs, mask, positions = padded
    size, columns = max(2, SCORED_LOGITS // model.facts.vocab_size), len(token_ids)
    places: list[Place] = []
    chosen_ones: list[float] = []
    for start in range(0, columns - 1, size):
        end = min(start + size, columns)
        here = slice(start, end)
        logits = forward(model, inputs[:, here], mask[:, :end], positions[:, here], cache, keep=end - start)[0]
        following = list(token_ids[start + 1 : end + 1])
        logprobs = torch.log_softmax(logits[: len(following)] / temperature, dim=-1)
        places += places_of(logprobs, following, [count] * len(following))
        chosen_ones += logprobs[torch.arange(len(following)), following].tolist()
    return Ranked.of(places, chosen_ones)


@torch.inference_mode()
def token_logprobs(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    firsts: Sequence[int],
    pass_tokens: int,
    temperatures: Sequence[float] = (),
) -> list[list[float]]:
    """Logprobs (nats, computed in fp32) of `sequences[i][firsts[i]:]`, each token given all before it.

    `firsts[i]` >= 1. `temperatures`: one per sequence; empty: 1. A pass has at most `pass_tokens` padded tokens, or one
    sequence; text only.
    """
    if not all(1 <= first < len(sequence) for sequence, first in zip(sequences, firsts, strict=True)):
        raise ValueError("every sequence needs a token before the first scored one, and one to score")
    found: list[list[float]] = [[] for _ in sequences]
    temperatures = temperatures or [1.0] * len(sequences)
    for rows in groups_by_length([len(sequence) for sequence in sequences], pass_tokens):
        scores, begin = _scored(
            model, [sequences[row] for row in rows], [firsts[row] for row in rows], [temperatures[row] for row in rows]
        )
        for row, start, logprobs in zip(rows, begin, scores, strict=True):
            found[row] = logprobs[start:]
    return found


def _scored(
    model: LoadedModel, sequences: Sequence[Sequence[int]], firsts: Sequence[int], temperatures: Sequence[float]
) -> tuple[list[list[float]], list[int]]:
    """(Scores of the last columns, index in them where each row's own begin); all rows end at the last column."""
    padded = left_padded(model, sequences)
    width = padded[0].shape[1]
    columns = [width - len(sequence) + first for sequence, first in zip(sequences, firsts, strict=True)]
    first = min(columns)
    _, scores = forward_scored(model, *padded, PrefillCache(model.module.config), first, temperatures)
    return scores.tolist(), [column - first for column in columns]


def left_padded(
    model: LoadedModel, contexts: Sequence[Sequence[int]], pad_token_id: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids, mask, positions), each (contexts, longest); the model's pad id unless the rows set their own."""
    width, device = max(map(len, contexts)), torch.device(model.facts.device)
    pad = model.pad_token_id if pad_token_id is None else pad_token_id
    padded = [[pad] * (width - len(context)) + list(context) for context in contexts]
    starts = torch.tensor([width - len(context) for context in contexts], device=device)
    mask = torch.arange(width, device=device) >= starts.unsqueeze(1)
    return torch.tensor(padded, device=device), mask, (mask.cumsum(dim=-1) - 1).clamp_(min=0)


def groups_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of similar length together, longest first: at most `max_tokens` padded tokens a group, or one row."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        if group and lengths[group[0]] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
