"""verl's published losses, KL estimators and advantages on the numbers from stdin; one JSON object to stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def gradient_of(leaf: Any) -> list[list[float]]:
    found: list[list[float]] = leaf.grad.tolist()
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    asked = json.load(sys.stdin)
    data = {name: torch.tensor(value, dtype=torch.float64) for name, value in asked["data"].items()}
    found: dict[str, Any] = {"losses": {}, "kl": {}, "advantages": {}}
    for case in asked["losses"]:
        config = FSDPActorConfig(
            rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=case["low"], clip_ratio_low=case["low"],
            clip_ratio_high=case["high"], clip_ratio_c=case["dual_clip"],
        )  # fmt: skip
        if case["mode"].endswith("norm"):
            config.global_batch_info["loss_scale_factor"] = case["tokens"]
        logp = data["logp"].clone().requires_grad_()
        loss, metrics = core_algos.get_policy_loss_fn(case["function"])(
            old_log_prob=data["proximal"],
            log_prob=logp,
            advantages=data["advantages"][:, None].expand(logp.shape),
            response_mask=data["mask"],
            loss_agg_mode=case["mode"],
            config=config,
            rollout_is_weights=(data["proximal"] - data["behaviour"]).exp() if case["weighted"] else None,
        )
        loss.backward()
        clipped = metrics["actor/pg_clipfrac"]
        found["losses"][case["name"]] = {"loss": loss.item(), "gradient": gradient_of(logp), "clipped": clipped}
    for name in asked["kl"]:
        logp = data["logp"].clone().requires_grad_()
        kl = core_algos.kl_penalty(logp, data["reference"], name)
        kl.sum().backward()
        found["kl"][name] = {"values": kl.tolist(), "gradient": gradient_of(logp)}
    rewards = torch.zeros_like(data["mask"])
    rewards[:, 0] = data["rewards"]
    groups = asked["groups"]
    for name, function, options in (
        ("group_norm", core_algos.compute_grpo_outcome_advantage, {"index": groups}),
        ("group_mean", core_algos.compute_grpo_outcome_advantage, {"index": groups, "norm_adv_by_std_in_grpo": False}),
        ("rloo", core_algos.compute_rloo_outcome_advantage, {"index": groups}),
    ):
        found["advantages"][name] = function(rewards.clone(), data["mask"], **options)[0][:, 0].tolist()
    print(json.dumps(found), file=answers)


main()
