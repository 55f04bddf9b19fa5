"""Samples → tensors: one sample a row, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from consumers.pack import IGNORED
from consumers.samples import blind
from consumers.training.proximal import proximal_of
from pipeline.errors import TaskError
from pipeline.wire.messages import TrainingSample


class Batch(TypedDict):
    """B samples of at most L tokens (prompt and response). Logprobs are natural, at `temperatures`.

    `labels[b, i]` is the target AT position i, predicted from positions before i: shift logits and labels against each
    other, as transformers does. It may differ from `input_ids[b, i]`: the truth's label on a sampled prefix.
    """

    seq_ids: list[str]
    group_ids: list[str]
    input_ids: Tensor  # int64 [B, L]
    attention_mask: Tensor  # int64 [B, L]: 1 = a token, 0 = padding
    labels: Tensor  # int64 [B, L]; -100 where the weight is 0
    weights: Tensor  # float32 [B, L]: of the cross-entropy
    prompt_lens: Tensor  # int64 [B]: the response starts here
    response_mask: Tensor  # int64 [B, L]: 1 = sampled by the policy
    logprobs: Tensor  # float32 [B, L]: of the version that sampled the token; 0 where none did
    versions: Tensor  # int64 [B, L]: that version; -1 where none did
    proximal_logprobs: Tensor  # float32 [B, L]: under proximal_versions; equal to logprobs where there is none
    proximal_versions: Tensor  # int64 [B, L]: versions + 1; -1 = not scored
    temperatures: Tensor  # float32 [B]
    rewards: Tensor  # float32 [B]; NaN = none
    advantages: Tensor  # float32 [B]; NaN = none


def tensors_of(samples: Sequence[TrainingSample], pad_id: int) -> Batch:
    """The samples in their order; `input_ids` are padded with `pad_id`. Raises TaskError for one with images."""
    for sample in samples:
        if sample.images:
            raise TaskError(f"{sample.seq_id}: {blind(len(sample.images))}")
    weights = _rows(samples, [sample.weights for sample in samples], 0.0, torch.float32)
    weights[:, :1] = 0.0  # nothing stands before the first token to predict it from
    labels = _rows(samples, [sample.labels for sample in samples], IGNORED, torch.int64)
    labels[weights == 0] = IGNORED
    proximal = [proximal_of(sample) for sample in samples]
    ones = [np.ones(len(sample.token_ids)) for sample in samples]
    return Batch(
        seq_ids=[sample.seq_id for sample in samples],
        group_ids=[sample.group_id for sample in samples],
        input_ids=_rows(samples, [sample.token_ids for sample in samples], pad_id, torch.int64),
        attention_mask=_rows(samples, ones, 0, torch.int64),
        labels=labels,
        weights=weights,
        prompt_lens=torch.tensor([sample.prompt_len for sample in samples]),
        response_mask=_rows(samples, [sample.response_mask.expand() for sample in samples], 0, torch.int64),
        logprobs=_rows(samples, [sample.logprobs for sample in samples], 0.0, torch.float32),
        versions=_rows(samples, [sample.versions.expand() for sample in samples], -1, torch.int64),
        proximal_logprobs=_rows(samples, [values for values, _ in proximal], 0.0, torch.float32),
        proximal_versions=_rows(samples, [versions for _, versions in proximal], -1, torch.int64),
        temperatures=torch.tensor([sample.temperature for sample in samples]),
        rewards=_numbers([sample.reward for sample in samples]),
        advantages=_numbers([sample.advantage for sample in samples]),
    )


def _rows(samples: Sequence[TrainingSample], values: Sequence[Any], fill: float, dtype: torch.dtype) -> Tensor:
    """An array that was not stamped is empty, and its row all `fill`."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    rows = torch.full((len(samples), longest), fill, dtype=dtype)
    for row, array in zip(rows, values, strict=True):
        row[: len(array)] = torch.as_tensor(np.asarray(array), dtype=dtype)
    return rows


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)
