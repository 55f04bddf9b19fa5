"""The losses against NumPy in float64, written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sluice.consumers.pack import IGNORED
from sluice.consumers.training import row_logits
from sluice.consumers.training.losses import (
    complete_iou,
    expected_coordinates,
    geometry_loss,
    row_logprobs,
    weighted_cross_entropy,
)
from sluice.consumers.training.row_logits import RowLogits


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def batch(rows: int = 3, length: int = 7, vocab: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0)
    logits = drawn.normal(size=(rows, length, vocab)) * 3
    labels = drawn.integers(0, vocab, size=(rows, length))
    weights = drawn.choice([0.0, 0.5, 1.0], size=(rows, length))
    return logits, np.where(weights > 0, labels, IGNORED), weights


def naive_cross_entropy(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    total = above = 0.0
    for row in range(logits.shape[0]):
        for at in range(1, logits.shape[1]):
            if labels[row, at] != IGNORED:
                above -= weights[row, at] * log_softmax(logits[row, at - 1])[labels[row, at]]
                total += weights[row, at]
    return above, total


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_cross_entropy(dtype: torch.dtype, rel: float) -> None:
    logits, labels, weights = batch()
    got = weighted_cross_entropy(
        RowLogits(torch.tensor(logits, dtype=dtype)), torch.tensor(labels), torch.tensor(weights)
    )
    assert got.sum.dtype in (torch.float32, torch.float64)
    assert (got.sum.item(), got.total.item()) == pytest.approx(naive_cross_entropy(logits, labels, weights), rel=rel)


def test_micro_batches_add_up_to_the_batch() -> None:
    logits, labels, weights = (torch.tensor(part) for part in batch())
    whole = weighted_cross_entropy(RowLogits(logits), labels, weights)
    parts = [
        weighted_cross_entropy(RowLogits(logits[at : at + 1]), labels[at : at + 1], weights[at : at + 1])
        for at in range(3)
    ]
    assert sum(part.sum.item() for part in parts) == pytest.approx(whole.sum.item())
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item())


def test_nothing_supervised_is_zero_with_a_gradient() -> None:
    logits = torch.zeros(1, 3, 5, requires_grad=True)
    got = weighted_cross_entropy(RowLogits(logits), torch.full((1, 3), IGNORED), torch.zeros(1, 3))
    got.sum.backward()
    assert got.sum.item() == got.total.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_gradients_only_reach_supervised_positions() -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[IGNORED, IGNORED, 3, IGNORED]])
    weighted_cross_entropy(RowLogits(logits), labels, torch.tensor([[0.0, 0.0, 1.0, 0.0]])).sum.backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(dim=-1) > 0).tolist() == [[False, True, False, False]]


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("at_once", [1, 5 * 11, 1 << 26])
def test_logprobs_of_rows(dtype: torch.dtype, rel: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_logits, "_AT_ONCE", at_once)
    logits, _, _ = batch()
    token_ids = np.random.default_rng(1).integers(0, 11, size=(3, 7))
    wanted = np.zeros((3, 7))
    for row in range(3):
        for at in range(1, 7):
            wanted[row, at] = log_softmax(logits[row, at - 1])[token_ids[row, at]]
    got = row_logprobs(RowLogits(torch.tensor(logits, dtype=dtype)), torch.tensor(token_ids))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=rel, atol=rel)


def test_expected_coordinates() -> None:
    drawn = np.random.default_rng(1)
    logits = drawn.normal(size=(2, 9, 1200))
    ids = drawn.permutation(1200)[:1000]
    rows, positions = np.array([0, 1]), np.array([[1, 2, 3, 4], [3, 5, 7, 8]])
    wanted = np.array(
        [
            [np.exp(log_softmax(logits[row, at - 1, ids])) @ (np.arange(1000) / 999) for at in places]
            for row, places in zip(rows, positions, strict=True)
        ]
    )
    tensors = [torch.tensor(part) for part in (rows, positions, ids)]
    np.testing.assert_allclose(
        expected_coordinates(RowLogits(torch.tensor(logits)), *tensors).numpy(), wanted, rtol=1e-12
    )


def naive_ciou(a: np.ndarray, b: np.ndarray) -> float:
    width, height = max(0, min(a[2], b[2]) - max(a[0], b[0])), max(0, min(a[3], b[3]) - max(a[1], b[1]))
    (wa, ha), (wb, hb) = a[2:] - a[:2], b[2:] - b[:2]
    iou = width * height / (wa * ha + wb * hb - width * height)
    hull = np.maximum(a[2:], b[2:]) - np.minimum(a[:2], b[:2])
    apart = ((a[:2] + a[2:] - b[:2] - b[2:]) ** 2).sum() / 4 / (hull**2).sum()
    shape = 4 / math.pi**2 * (math.atan(wb / hb) - math.atan(wa / ha)) ** 2
    return iou - apart - (shape**2 / (1 - iou + shape) if shape else 0.0)


def boxes(count: int, seed: int) -> np.ndarray:
    corners = np.sort(np.random.default_rng(seed).uniform(size=(count, 2, 2)), axis=1)
    return corners.reshape(count, 4)


def test_geometry_loss() -> None:
    a, b = boxes(50, 2), boxes(50, 3)
    ciou = np.array([naive_ciou(left, right) for left, right in zip(a, b, strict=True)])
    smooth = np.where(np.abs(a - b) < 1, 0.5 * (a - b) ** 2, np.abs(a - b) - 0.5).mean(axis=1)
    np.testing.assert_allclose(complete_iou(torch.tensor(a), torch.tensor(b)).numpy(), ciou, atol=2e-4)
    got = geometry_loss(torch.tensor(a), torch.tensor(b), smooth_l1_weight=0.7, ciou_weight=0.3)
    assert got.total.item() == 50
    assert got.sum.item() == pytest.approx((0.7 * smooth + 0.3 * (1 - ciou)).sum(), rel=1e-4)


def test_equal_boxes_cost_nothing_and_strange_ones_no_nan() -> None:
    same = torch.tensor(boxes(5, 4))
    assert geometry_loss(same, same).sum.item() == pytest.approx(0, abs=1e-3)
    strange = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.1, 0.1]], dtype=torch.float64, requires_grad=True)
    loss = geometry_loss(strange, torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.2, 0.2, 0.4, 0.4]]))
    loss.sum.backward()
    assert torch.isfinite(loss.sum)
    assert strange.grad is not None
    assert torch.isfinite(strange.grad).all()
    assert geometry_loss(torch.zeros(0, 4), torch.zeros(0, 4)).sum.item() == 0
