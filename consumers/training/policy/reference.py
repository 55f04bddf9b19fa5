"""The KL to a frozen reference: which tokens are scored under it, their scores, and the three estimators.

    plans ─┬─ v is the reference: the trainer's own pass before its update ─┬─▶ reference_scores ─▶ PolicyTerm
           └─ else: reference_jobs ─▶ scorers ─▶ answers ───────────────────┘

With d = log p(token) under the trained weights - the same under the reference, for tokens sampled by the former:

| estimator | of a token      | its mean                                        | gradient of the mean            |
|-----------|-----------------|-------------------------------------------------|---------------------------------|
| k1        | d               | KL(trained ‖ reference); a token may be below 0 | 0                               |
| k2        | d² / 2          | about that, biased; never below 0               | that of KL(trained ‖ reference) |
| k3        | exp(-d) - 1 + d | KL(trained ‖ reference); never below 0          | that of KL(reference ‖ trained) |

- Every token that may be trained is scored. One whose score didn't come is NaN: it is counted, and not in the term.
- The reference is a published version, which the registry and `versions.retire` keep whatever `weights.retention` is;
  or a directory, which scorers read.

Source: Schulman, 2020 (Approximating KL divergence); k3 is GRPO's (Shao et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sluice.consumers.training.policy.proximal import Mask, Plan, score_job
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult


def kl_estimate(logp: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per token, from logprobs (nats) under the trained weights, with gradient, and under the reference, without."""
    apart = logp - reference
    match estimator:
        case "k1":
            return apart
        case "k2":
            return apart.square() / 2
        case "k3":
            return (-apart).expm1() + apart


def is_the_trainers(plan: Plan, reference: int | None) -> bool:
    """Whether the trainer's own weights are the reference: a pass before its update scores the sample."""
    return reference is not None and plan.own_version == reference and bool(_wanted(plan).any())


def reference_jobs(plans: Iterable[Plan], reference: int | None, run: str) -> list[ScoreJob]:
    """One per sample with tokens that may be trained, unless the trainer scores them itself."""
    if reference is None:
        return []
    wanted = [(plan, _wanted(plan)) for plan in plans if not is_the_trainers(plan, reference)]
    return [score_job(plan, where, reference, run) for plan, where in wanted if where.any()]


def reference_scores(
    plans: Mapping[str, Plan],
    reference: int,
    own: Mapping[str, Sequence[float]],
    answers: Mapping[str, Sequence[ScoreResult]],
) -> dict[str, NDArray[np.float64]]:
    """By seq_id, (len(token_ids),): logprobs under the reference, NaN where there is none.

    `own`: rows of the trainer's pass, read where its weights are the reference; `answers`: of scorers.
    """
    found: dict[str, NDArray[np.float64]] = {}
    for seq_id, plan in plans.items():
        where = _wanted(plan)
        scores = np.full(len(where), np.nan)
        if is_the_trainers(plan, reference):
            scores[where] = np.array(own[seq_id], dtype=np.float64)[where]
        for result in answers.get(seq_id, ()):
            if result.error or result.scored_version != reference:
                continue
            for position, logprob in zip(result.positions, result.logprobs, strict=True):
                at = position + plan.sample.prompt_len
                if position >= 0 and at < len(where) and where[at]:
                    scores[at] = logprob
        found[seq_id] = np.where(np.isfinite(scores), scores, np.nan)
    return found


def _wanted(plan: Plan) -> Mask:
    """The tokens that may be trained; some may still lack a proximal logprob."""
    return plan.tokens & ~plan.foreign & ~plan.stale & (not plan.is_lost)
