"""Forcing rows touches nothing else."""

from __future__ import annotations

import pytest
import torch

from sluice.workers.guard.watch import force


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
@pytest.mark.parametrize("tokens", [{1: 0}, {0: 4, 3: 0}, {2: 1, 0: 1, 1: 1, 3: 1}])
def test_a_forced_row_has_one_token_and_the_others_keep_every_bit(
    tokens: dict[int, int], dtype: torch.dtype, bits: torch.dtype
) -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, 2], logits[3, 1], logits[3, 2] = float("nan"), -0.0, float("-inf")
    before = logits.clone()
    assert force(logits, tokens) is logits
    for row in range(4):
        if row in tokens:
            assert logits[row].tolist() == [0.0 if at == tokens[row] else float("-inf") for at in range(5)]
        else:
            assert torch.equal(logits[row].view(bits), before[row].view(bits))
