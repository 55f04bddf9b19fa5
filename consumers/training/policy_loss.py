"""The decoupled PPO loss: importance ratio against the proximal policy, corrected for the behaviour policy.

    r  = exp(logp - proximal)                                   the trained policy against the proximal one
    pg = max(-A·r, -A·clip(r, 1-ε, 1+ε_hi)); where A < 0: at most -A·c
    w  = exp(proximal - behaviour)                              without gradient
    L  = Σ m·pg·w / max(1, Σ m)

- Tokens with w > cap or w < floor are left out of the upper sum and counted; Σ m below is taken before that.
- Sums come out, the caller divides by Σ m of the whole optimiser batch: its split into micro-batches has no effect.
- A token that does not count, by mask, cap, floor, clip or A = 0, gives exactly no gradient, whatever its numbers
  are: its ratio is replaced before the exponential, since the gradient of an unused infinity is NaN.

Source: Schulman et al., 2017 (clip); Ye et al., 2020 (dual clip); Hilton et al., 2022 (proximal against behaviour).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.types import PolicyConfig

_MOST_LOG_RATIO = 20.0  # in metrics only: one strange token must not make a mean infinite


class PolicySums(NamedTuple):
    """Scalars, sums over tokens; `loss` alone has a gradient."""

    loss: Tensor  # Σ m·pg·w over the kept tokens
    tokens: Tensor  # Σ m
    kept: Tensor  # tokens inside cap and floor
    importance_weight: Tensor  # Σ m·r
    approx_kl: Tensor  # Σ m·((r - 1) - log r): k3, its mean estimates KL(proximal ‖ trained)
    clipped: Tensor  # tokens whose clipped branch is the greater one
    dual_clipped: Tensor  # tokens that the dual clip changed
    behaviour_weight: Tensor  # Σ w over the kept tokens
    behaviour_kl: Tensor  # Σ m·(behaviour - proximal): k1, its mean estimates KL(behaviour ‖ proximal)
    capped: Tensor  # tokens with w > cap
    floored: Tensor  # tokens with w < floor, or a w that is no number


def policy_loss(
    logp: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, options: PolicyConfig
) -> PolicySums:
    """Sums over the tokens where `mask` is True.

    `logp` (with gradient), `proximal`, `behaviour`: log-probabilities in nats of the same tokens; `advantages`;
    all float, `mask` bool, all of one shape. Computed in float32 at least; float64 stays float64. The log-ratios
    of the metrics are limited to ±20; those of the loss are not.
    """
    logp = logp.to(torch.promote_types(logp.dtype, torch.float32))
    proximal, behaviour, advantages = (part.detach().to(logp) for part in (proximal, behaviour, advantages))
    weight = (proximal - behaviour).exp()
    capped = mask & (weight > options.weight_cap)
    floored = mask & ~capped & ~(weight >= options.weight_floor)
    kept = mask & ~capped & ~floored
    weight = weight.where(kept, 0)
    pg, clipped, dual_clipped = _surrogate(logp - proximal, advantages, kept, options)
    change = _bounded(logp.detach() - proximal, mask)
    return PolicySums(
        loss=(pg * weight).sum(),
        tokens=mask.sum(),
        kept=kept.sum(),
        importance_weight=change.exp().where(mask, 0).sum(),
        approx_kl=(change.expm1() - change).sum(),
        clipped=(mask & clipped).sum(),
        dual_clipped=(mask & dual_clipped).sum(),
        behaviour_weight=weight.sum(),
        behaviour_kl=_bounded(behaviour - proximal, mask).sum(),
        capped=capped.sum(),
        floored=floored.sum(),
    )


def _surrogate(
    log_ratio: Tensor, advantages: Tensor, kept: Tensor, options: PolicyConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """pg per token, 0 where not kept; where the clip, and where the dual clip decided."""
    high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
    with torch.no_grad():
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        limit = -advantages * ratio.clamp(1 - options.clip_eps, 1 + high)
        clipped = limit > plain
        dual_clipped = torch.zeros_like(clipped)
        if options.dual_clip is not None:
            most = -advantages * options.dual_clip
            dual_clipped = (advantages < 0) & (torch.maximum(plain, limit) > most)
            limit = limit.where(~dual_clipped, most)
        free = kept & ~clipped & ~dual_clipped & (advantages != 0)
    moving = -advantages * log_ratio.where(free, 0).exp()
    return torch.where(free, moving, limit.where(kept, 0)), clipped, dual_clipped


def _bounded(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.where(mask, 0).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
