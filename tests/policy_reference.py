"""The policy loss token by token in float64, written from the formulas; its gradient by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sluice.pipeline.config.types import PolicyConfig

Token = tuple[float, float, float, float]  # logp, proximal, behaviour, advantage


@dataclass
class Reference:
    """Sums over tokens; `gradient` of the loss, one number per given token, 0 where the mask is off."""

    loss: float = 0.0
    tokens: int = 0
    kept: int = 0
    importance_weight: float = 0.0
    approx_kl: float = 0.0
    clipped: int = 0
    dual_clipped: int = 0
    behaviour_weight: float = 0.0
    behaviour_kl: float = 0.0
    capped: int = 0
    floored: int = 0
    entropy: float = 0.0
    mismatch: float = 0.0
    measured: int = 0
    beyond: int = 0
    kl: float = 0.0
    reference_kl: float = 0.0
    referenced: int = 0
    unreferenced: int = 0


def reference(tokens: Iterable[Token], mask: Iterable[bool], options: PolicyConfig) -> tuple[Reference, np.ndarray]:
    """Loss and counts, and the gradient with respect to logp."""
    found, gradient = Reference(), []
    for token, on in zip(tokens, mask, strict=True):
        gradient.append(_one(found, token, options) if on else 0.0)
    return found, np.array(gradient)


def _one(found: Reference, token: Token, options: PolicyConfig) -> float:
    logp, proximal, behaviour, advantage = token
    ratio, weight = math.exp(logp - proximal), math.exp(proximal - behaviour)
    found.tokens += 1
    found.importance_weight += ratio
    found.approx_kl += ratio - 1 - (logp - proximal)
    found.behaviour_kl += behaviour - proximal
    high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
    inside = min(max(ratio, 1 - options.clip_eps), 1 + high)
    pg, slope = -advantage * ratio, -advantage * ratio
    if -advantage * inside > pg:
        pg, slope = -advantage * inside, 0.0
        found.clipped += 1
    if options.dual_clip is not None and advantage < 0 and pg > -advantage * options.dual_clip:
        pg, slope = -advantage * options.dual_clip, 0.0
        found.dual_clipped += 1
    if weight > options.weight_cap:
        found.capped += 1
        return 0.0
    if weight < options.weight_floor:
        found.floored += 1
        return 0.0
    found.kept += 1
    found.unreferenced += 1  # no KL term: tests/unit/consumers/test_reference_kl.py
    found.behaviour_weight += weight
    found.loss += pg * weight
    return slope * weight
