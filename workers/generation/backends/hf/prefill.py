"""The prefill of rows that join the batch, or go on under new weights.

- Equal contexts are prefilled once. A prompt with an image is prefilled alone.
- The same pass scores the tokens that the version before sampled: their proximal logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeline.errors import EngineError, RequestError
from workers.generation.backends.hf.cache import PrefillCache
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.backends.hf.passes import forward_scored
from workers.generation.backends.hf.rows import Row
from workers.generation.backends.hf.vision import prefill_image

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass; bounds its memory."""


@dataclass(slots=True)
class Prefilled:
    """What one pass gave; row i of the group is row `pick[i]` of it."""

    cache: PrefillCache
    logits: torch.Tensor  # float32 (contexts, vocab), after the last token
    offset: int  # next position - length
    pick: list[int]


Errors = dict[int, tuple[Row, EngineError]]
"""Rows of the group that cannot go on, by index."""


def prefill(model: LoadedModel, rows: Sequence[Row], version: int) -> tuple[Prefilled | None, Errors]:
    """One group of `prefill_groups` through the model, whose weights are `version`; scores are taken by the rows.

    Nothing was made where every row has an error.
    """
    unscored = [row.unscored(version) for row in rows]
    try:
        done, scores, begin = _image_pass(model, rows, unscored) if rows[0].vision else _pass(model, rows, unscored)
    except RequestError as error:
        return None, {index: (row, error) for index, row in enumerate(rows)}
    errors: Errors = {}
    for index, (row, tokens) in enumerate(zip(rows, unscored, strict=True)):
        try:
            if tokens:
                given, start = scores[done.pick[index]], begin[index]
                row.score(version, tokens, [given[start + token] for token in tokens])
        except EngineError as error:
            errors[index] = (row, error)
    return done, errors


def prefill_groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of like length together, at most PREFILL_TOKENS padded tokens a group (or one row).

    Rows with an image: those of one context and one image together.
    """
    group: list[Row] = []
    images: dict[tuple[int, tuple[int, ...], float], list[Row]] = {}
    for row in sorted(rows, key=lambda row: len(row.context), reverse=True):
        if row.vision is not None:
            images.setdefault((id(row.vision), tuple(row.tokens), row.logprob_temperature), []).append(row)
            continue
        if group and len(group[0].context) * (len(group) + 1) > PREFILL_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
    yield from images.values()


_Scores = list[list[float]]


def _pass(
    model: LoadedModel, rows: Sequence[Row], unscored: Sequence[list[int]]
) -> tuple[Prefilled, _Scores, list[int]]:
    """Text: (what it gave, scores per context, where in them token 0 of each row lies)."""
    unique: dict[tuple[tuple[int, ...], float], int] = {}
    pick = [unique.setdefault((tuple(row.context), row.logprob_temperature), len(unique)) for row in rows]
    inputs, mask = _left_padded([context for context, _ in unique], rows[0].pad_token_id, model)
    width, cache = inputs.shape[1], PrefillCache(model.module.config)
    zeros = [width - len(row.tokens) for row in rows]  # column of token 0; contexts end at the last column
    first = min((zero + tokens[0] for zero, tokens in zip(zeros, unscored, strict=True) if tokens), default=None)
    positions = (mask.cumsum(dim=-1) - 1).clamp_(min=0)
    logits, scores = forward_scored(model, inputs, mask, positions, cache, first, [heat for _, heat in unique])
    return Prefilled(cache, logits, 0, pick), scores.tolist(), [zero - (first or 0) for zero in zeros]


def _image_pass(
    model: LoadedModel, rows: Sequence[Row], unscored: Sequence[list[int]]
) -> tuple[Prefilled, _Scores, list[int]]:
    vision, cache = rows[0].vision, PrefillCache(model.module.config)
    assert vision is not None
    first = min((tokens[0] for tokens in unscored if tokens), default=None)
    logits, scores, offset = prefill_image(model, vision, rows[0].tokens, cache, first, rows[0].logprob_temperature)
    return Prefilled(cache, logits, offset, [0] * len(rows)), scores.tolist(), [-(first or 0)] * len(rows)


def _left_padded(
    contexts: Sequence[tuple[int, ...]], pad_token_id: int | None, model: LoadedModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, mask), both (contexts, longest)."""
    width, device = max(map(len, contexts)), torch.device(model.facts.device)
    pad = model.pad_token_id if pad_token_id is None else pad_token_id
    padded = [[pad] * (width - len(context)) + list(context) for context in contexts]
    starts = torch.tensor([width - len(context) for context in contexts], device=device)
    mask = torch.arange(width, device=device) >= starts.unsqueeze(1)
    return torch.tensor(padded, device=device), mask
