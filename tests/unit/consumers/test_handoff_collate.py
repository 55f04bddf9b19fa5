"""Batches of a hand-off: what a training loop of one's own is given."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.consumers.training.handoff import tensors_of
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.factories import training_sample

BEHAVIOUR = [0.0, -1.0, -2.0, -3.0]


@pytest.mark.parametrize("garbage", [0.0, 5.0, math.nan, -math.inf])
def test_garbage_in_a_marked_token_is_not_handed_on(garbage: float) -> None:
    sample = training_sample(
        "s:0",
        4,
        logprobs=FloatArray(BEHAVIOUR),
        versions=Runs.of([-1, 0, 1, 1]),
        proximal_logprobs=FloatArray([0.0, -1.5, garbage, garbage]),
        proximal_versions=Runs.of([-1, 1, -1, 5]),
        response_mask=Runs.of([0, 1, 1, 1]),
    )
    batch = tensors_of([sample], 0, line=Line.consecutive(6))
    assert batch["proximal_logprobs"].tolist() == [[0.0, -1.5, -2.0, -3.0]]
    assert batch["proximal_versions"].tolist() == [[-1, 1, -1, -1]]


def test_what_nobody_scored_has_its_behaviour_logprob() -> None:
    marked = training_sample("s:0", 4, logprobs=FloatArray(BEHAVIOUR), versions=Runs.of([-1, 0, 0, 0]))
    plain = training_sample("s:1", 3)
    batch = tensors_of([marked, plain], 0)
    assert torch.equal(batch["proximal_logprobs"], batch["logprobs"])
    assert batch["proximal_logprobs"].tolist() == [BEHAVIOUR, [0.0] * 4]
    assert (batch["proximal_versions"] == -1).all()


def test_totals_count_what_can_be_trained() -> None:
    weights = FloatArray([1.0, 0.0, 0.25, 0.25])  # the first token has nothing to predict it
    totals = tensors_of([training_sample("a:0", 4, weights=weights)], pad_id=0)["totals"]
    assert (totals["weight"], totals["weighted_tokens"]) == (0.5, 2)
