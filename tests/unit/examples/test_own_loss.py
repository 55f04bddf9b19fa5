"""The example of a loss and the one in docs/policy.md: what they give, and that a step trains with them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.training.policy.loss import policy_loss
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step

ROOT = Path(__file__).parents[3]
[(NAME, TEXT)] = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", (ROOT / "docs/policy.md").read_text(), re.M | re.S)


def loss_of(path: str, ratios: list[float], advantage: float) -> tuple[float, list[float], float]:
    """Loss, slopes and clipped tokens of one sequence whose policy moved by these ratios."""
    logp = torch.zeros(len(ratios), dtype=torch.float64, requires_grad=True)
    proximal = -torch.tensor(ratios, dtype=torch.float64).log()
    options = PolicyConfig(loss=path, clip_eps=0.25)
    sums = policy_loss(
        logp, proximal, proximal, torch.full_like(proximal, advantage), torch.ones(len(ratios)) == 1, options
    )
    sums.loss.backward()
    assert logp.grad is not None
    return sums.loss.item(), logp.grad.tolist(), sums.clipped.item()


def test_the_penalty_pulls_back() -> None:
    loss, slopes, clipped = loss_of(f"{ROOT}/examples/own_loss.py:spo", [1.0, 1.25, 2.0], 1.0)
    assert loss == pytest.approx(-1 + (-1.25 + 0.125) + (-2 + 2))
    assert slopes == pytest.approx([-1.0, 0.0, 6.0])  # r·(-1 + (r - 1) / ε)
    assert clipped == 1


def test_with_one_ratio_a_sequence() -> None:
    loss, slopes, _ = loss_of(f"{ROOT}/examples/own_loss.py:spo_of_sequences", [0.5, 2.0], -1.0)
    assert (loss, slopes) == (pytest.approx(2.0), pytest.approx([1.0, 1.0]))


def test_the_one_of_the_page_trains(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(TEXT)
    policy = PolicyConfig(enabled=True, loss=f"{tmp_path / NAME}:reinforce")
    step = train_step(save_tiny_model(tmp_path / "model"), policy=policy, learning_rate=1e-3)
    sample = random_sample("s", 12)
    [before] = step.score([sample])
    scores = FloatArray(before)
    told = replace(
        sample,
        weights=FloatArray([0.0] * 12),
        logprobs=scores,
        proximal_logprobs=scores,
        response_mask=Runs.of([0] * 2 + [1] * 10),
        advantage=1.0,
    )
    record = step.run([told], 1)
    assert record["policy/loss"] == pytest.approx(-math.fsum(before[2:]) / 10, rel=1e-5)
    [after] = step.score([sample])
    assert math.fsum(after[2:]) > math.fsum(before[2:]) + 0.1
