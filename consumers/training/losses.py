"""Teacher-forced losses, each as a sum and its divisor; log-probabilities of given tokens.

- Micro-batches are combined by adding sums and totals over the optimiser batch; the loss is sum / total, so
  the split into micro-batches and rows has no effect on it.
- `labels[:, i]` is the target at position i: its logits are those of position i - 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sluice.consumers.pack import IGNORED

_EPS = 1e-7
_SCORED_AT_ONCE = 1 << 25  # logits: 128 MiB in float32


class Weighed(NamedTuple):
    """Scalars: `total` has no gradient; loss = sum / total over the optimiser batch."""

    sum: Tensor
    total: Tensor


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Weighed:
    """sum_i w_i * CE_i in nats and sum_i w_i.

    `logits` float [R, L, V]; `labels` int64 [R, L], -100 off; `weights` float [R, L]. Computed in float32 or wider,
    over the supervised positions only (a full float32 copy of the logits would not fit).
    """
    target, weight = labels[:, 1:], weights[:, 1:]
    on = (target != IGNORED) & (weight != 0)
    picked = _at_least_float32(logits[:, :-1][on])
    weight = weight[on].to(picked.dtype)
    losses = F.cross_entropy(picked, target[on], reduction="none")
    return Weighed((losses * weight).sum(), weight.sum())


def token_logprobs(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """log p in nats of `token_ids` int64 [N] under `logits` float [N, V]; float [N], float32 or wider.

    `temperatures` float [N]: divisors of the logits.
    """
    logits = _at_least_float32(logits)
    if temperatures is not None:
        logits = logits / temperatures.to(logits).unsqueeze(1)
    return -F.cross_entropy(logits, token_ids, reduction="none")


def token_entropies(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Entropy in nats of each distribution, float [N], float32 or wider, with gradient.

    `logits` float [N, V]; `temperatures` float [N]. Computed in chunks, and again in the backward pass: neither keeps a
    float32 copy of all logits.
    """
    most = max(1, _SCORED_AT_ONCE // logits.shape[-1])
    found = [
        checkpoint(
            _entropies,
            logits[start : start + most],
            None if temperatures is None else temperatures[start : start + most],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, len(logits), most)
    ]
    return torch.cat(found) if found else _at_least_float32(logits.sum(dim=-1))


def _entropies(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    logits = _at_least_float32(logits)
    if temperatures is not None:
        logits = logits / temperatures.to(logits).unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1)
    # What is excluded has -inf, whose product with its probability 0 would be NaN.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)


def row_logprobs(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """log p in nats of each of `token_ids` int64 [R, L] given those before it in its row; 0 in the first column.

    `logits` float [R, L, V]; `temperatures` float [R, L], per token. Returns float [R, L], float32 or wider. Computed
    in chunks: a float32 copy of all logits would not fit.
    """
    flat, targets = logits.flatten(0, 1), token_ids.roll(-1, dims=1).flatten()
    shifted = None if temperatures is None else temperatures.roll(-1, dims=1).flatten()
    most = max(1, _SCORED_AT_ONCE // logits.shape[-1])
    pieces = [slice(start, start + most) for start in range(0, len(flat), most)]
    found = [
        token_logprobs(flat[piece], targets[piece], None if shifted is None else shifted[piece]) for piece in pieces
    ]
    scores = torch.cat(found).view(token_ids.shape).roll(1, dims=1)
    scores[:, :1] = 0.0
    return scores


def expected_coordinates(logits: Tensor, rows: Tensor, positions: Tensor, coord_ids: Tensor) -> Tensor:
    """sum_k p(k) * k / (K - 1) with p over the K coordinate tokens only; float [N, 4] in 0..1.

    `logits` [R, L, V]; `rows` int64 [N]; `positions` int64 [N, 4] of the coordinate tokens (> 0); `coord_ids`
    int64 [K], ordered by value.
    """
    picked = _at_least_float32(logits[rows[:, None], positions - 1][..., coord_ids])
    steps = torch.arange(len(coord_ids), device=picked.device, dtype=picked.dtype) / (len(coord_ids) - 1)
    return picked.softmax(dim=-1) @ steps


def geometry_loss(predicted: Tensor, truth: Tensor, smooth_l1_weight: float = 1.0, ciou_weight: float = 1.0) -> Weighed:
    """Sum over boxes of smooth_l1_weight * SmoothL1 (mean of 4) + ciou_weight * (1 - CIoU); number of boxes.

    `predicted`, `truth` float [N, 4], xyxy in 0..1.
    """
    truth = truth.to(predicted)
    smooth = F.smooth_l1_loss(predicted, truth, reduction="none").mean(dim=-1)
    losses = smooth_l1_weight * smooth + ciou_weight * (1 - complete_iou(predicted, truth))
    return Weighed(losses.sum(), torch.tensor(float(len(losses)), device=losses.device, dtype=losses.dtype))


def complete_iou(predicted: Tensor, truth: Tensor) -> Tensor:
    """CIoU (Zheng et al., 2020) of xyxy boxes, float [N]; no NaN for boxes that are empty or out of order."""
    size, true_size = _size(predicted), _size(truth)
    low = torch.maximum(predicted[:, :2], truth[:, :2])
    high = torch.minimum(predicted[:, 2:], truth[:, 2:])
    inter = (high - low).clamp(min=0).prod(dim=-1)
    iou = inter / (size.prod(dim=-1) + true_size.prod(dim=-1) - inter + _EPS)
    hull = torch.maximum(predicted[:, 2:], truth[:, 2:]) - torch.minimum(predicted[:, :2], truth[:, :2])
    centres = (predicted[:, :2] + predicted[:, 2:] - truth[:, :2] - truth[:, 2:]) / 2
    apart = centres.square().sum(dim=-1) / (hull.square().sum(dim=-1) + _EPS)
    shape = (4 / math.pi**2) * (_angle(true_size) - _angle(size)).square()
    with torch.no_grad():
        alpha = shape / (1 - iou + shape + _EPS)
    return iou - apart - alpha * shape


def _size(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)


def _angle(size: Tensor) -> Tensor:
    return torch.atan(size[:, 0] / (size[:, 1] + _EPS))


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
