"""The judge of near-ties: it knows what the sampler draws, and lets nothing else pass where the choice is clear."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.sampling import DrawTable
from tests.contract.near_ties import possible_tokens

VOCAB = 50
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
)


@settings(derandomize=True, max_examples=400)  # one in some 50,000 has five: a run of unlikely tokens at the point
@given(asked=params, seed=st.integers(0, 2**32 - 1), at=st.integers(0, 200))
def test_what_is_drawn_may_be_drawn_and_hardly_anything_else(asked: SamplingParams, seed: int, at: int) -> None:
    logits = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    request = SequenceRequest("s", (1,), asked, seed)
    drawn = int(logits.argmax())
    if asked.temperature:
        table = DrawTable.of([asked], [seed], VOCAB, torch.device("cpu"))
        drawn = int(table.draw(logits[None].float(), np.array([at], dtype=np.int64))[0])
    possible = possible_tokens(logits, request, at, 1e-4)
    assert drawn in possible
    assert len(possible) <= 4, "in as many as four ways at most: the point and the border each have a near-tie"
