"""Two decodes of one request may part only where fp32 rounding decides: at a near-tie."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.sampling import stream_keys, uniforms

MARGIN = 1e-4  # nats between the best two, or probability between a random point and the next token's part


def assert_same_unless_near_tie(
    model: Any, request: SequenceRequest, one: SequenceOutput, other: SequenceOutput, margin: float = MARGIN
) -> int:
    """Number of equal tokens; raises AssertionError when they part at a clear choice."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    at = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
    if at is None:
        assert one.token_ids == other.token_ids
        return len(one.token_ids)
    logits = _logits(model, [*request.prompt_token_ids, *one.token_ids[:at]])
    apart = _margin(logits, request, at, one.token_ids[at], other.token_ids[at])
    assert apart <= margin, f"token {at} differs at a margin of {apart}: {one.token_ids[at]}, {other.token_ids[at]}"
    return at


def _logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].double()


def _margin(logits: torch.Tensor, request: SequenceRequest, at: int, left: int, right: int) -> float:
    temperature = request.sampling.temperature
    if temperature == 0:
        best = logits.topk(2).values
        return float(best[0] - best[1])
    bounds = torch.softmax(logits / temperature, -1).cumsum(-1)
    point = uniforms(stream_keys([request.seed]), np.array([at], dtype=np.int64))[0]
    return abs(float(bounds[min(left, right)]) - float(point))
