"""Teacher-forced losses, each as a sum and its divisor; log-probabilities of given tokens.

- Micro-batches are combined by adding sums and totals over the optimiser batch; the loss is sum / total (of the
  cross-entropy beside a policy loss another divisor, see step.py), so the split into micro-batches and rows has no
  effect on it.
- `labels[:, i]` is the target at position i: its logits are those of position i - 1.
- No function makes the logits of all positions at once (row_logits.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.consumers.pack import IGNORED
from sluice.consumers.training.row_logits import RowLogits

_EPS = 1e-7


class Weighed(NamedTuple):
    """Scalars: `total` has no gradient; loss = sum / total over the optimiser batch."""

    sum: Tensor
    total: Tensor


def weighted_cross_entropy(logits: RowLogits, labels: Tensor, weights: Tensor) -> Weighed:
    """sum_i w_i * CE_i in nats and sum_i w_i.

    `logits` of R rows with L positions; `labels` int64 [R, L], -100 off; `weights` float [R, L]. Computed in float32 or
    wider, over the supervised positions only.
    """
    target, weight = labels[:, 1:], weights[:, 1:]
    on = (target != IGNORED) & (weight != 0)
    logprobs = logits.logprobs(on, target[on])
    weight = weight[on].to(logprobs.dtype)
    return Weighed(-(logprobs * weight).sum(), weight.sum())


def row_logprobs(logits: RowLogits, token_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """log p in nats of each of `token_ids` int64 [R, L] given those before it in its row; 0 in the first column.

    `temperatures` float [R, L], per token. Returns float [R, L], float32 or wider.
    """
    targets = token_ids[:, 1:]
    everywhere = torch.ones_like(targets, dtype=torch.bool)
    heat = None if temperatures is None else temperatures[:, 1:].flatten()
    scores = logits.logprobs(everywhere, targets.flatten(), heat)
    return F.pad(scores.view(targets.shape), (1, 0))


def expected_coordinates(logits: RowLogits, rows: Tensor, positions: Tensor, coord_ids: Tensor) -> Tensor:
    """sum_k p(k) * k / (K - 1) with p over the K coordinate tokens only; float [N, 4] in 0..1.

    `rows` int64 [N]; `positions` int64 [N, 4] of the coordinate tokens (> 0); `coord_ids` int64 [K], ordered by value.
    """
    flat = rows.repeat_interleave(positions.shape[1])
    picked = logits.logits_of(flat, positions.flatten() - 1, coord_ids).view(*positions.shape, len(coord_ids))
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
