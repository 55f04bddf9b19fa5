"""Policy losses of your own: a function of the tokens that returns a loss per token.

    sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward my_rewards.py:score \
        --set policy.loss=examples/own_loss.py:spo

Weights against staleness, masks and the mean over the batch are applied to what it returns; see docs/policy.md.
"""

from __future__ import annotations

import torch

from sluice.consumers.training.policy.surrogate import Losses, PolicyTokens
from sluice.pipeline.config.types import PolicyConfig


def spo(tokens: PolicyTokens, options: PolicyConfig) -> Losses:
    """-(A·r - |A|·(r - 1)² / 2ε): a penalty pulls ratios back that PPO's clip only lets go (Xie et al., 2024, SPO)."""
    ratio = (tokens.logp - tokens.proximal).exp()
    penalty = tokens.advantages.abs() * (ratio - 1).square() / (2 * options.clip_eps)
    return Losses(penalty - tokens.advantages * ratio, clipped=(ratio - 1).abs() > options.clip_eps)


def spo_of_sequences(tokens: PolicyTokens, options: PolicyConfig) -> torch.Tensor:
    """The same with one ratio per sequence, the geometric mean of its tokens'."""
    ratio = tokens.sequence_mean(tokens.logp - tokens.proximal).exp()
    penalty = tokens.advantages.abs() * (ratio - 1).square() / (2 * options.clip_eps)
    return penalty - tokens.advantages * ratio
