"""Two decodes of one request may part only where fp32 rounding decides: at a near-tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.sampling import keep_top_p, stream_keys, uniforms

MARGIN = 1e-4  # nats between the best two, or probability where a token is drawn


def assert_same_unless_near_tie(
    model: Any, request: SequenceRequest, one: Sequence[int], other: Sequence[int], margin: float = MARGIN
) -> int:
    """Number of equal tokens; raises AssertionError when they part at a clear choice."""
    at = next((place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    if at is None:
        assert len(one) == len(other)
        return len(one)
    logits = _logits(model, [*request.prompt_token_ids, *one[:at]])
    drawn, possible = {one[at], other[at]}, possible_tokens(logits, request, at, margin)
    assert drawn <= possible, f"token {at} differs beyond {margin}: {sorted(drawn)}, where {sorted(possible)} may be"
    return at


def _logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].double()


def possible_tokens(logits: torch.Tensor, request: SequenceRequest, at: int, margin: float) -> set[int]:
    """What may be drawn where rounding moves logits (vocab,), the random point or the border of the nucleus."""
    asked = request.sampling
    assert (asked.top_k, asked.min_p) == (0, 0.0), "rounding at their borders is not known here"
    if asked.temperature == 0:
        return set(torch.nonzero(logits >= logits.max() - margin).flatten().tolist())
    point, found = uniforms(stream_keys([request.seed]), np.array([at], dtype=np.int64))[0], set[int]()
    for top_p in {asked.top_p, asked.top_p - margin, asked.top_p + margin} if asked.top_p < 1 else {1.0}:
        kept = keep_top_p(logits[None] / asked.temperature, torch.tensor([[top_p]]))[0]
        bounds = torch.softmax(kept, -1).cumsum(-1)
        first, last = torch.searchsorted(bounds, torch.tensor([point - margin, point + margin]), right=True).tolist()
        found |= {token for token in range(first, last + 1) if token < len(kept) and kept[token].isfinite()}
    return found
