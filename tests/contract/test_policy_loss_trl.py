"""The policy losses, the KL to a reference and DPO beside TRL's published ones, on the same tokens: values, gradients.

`_compute_loss` of GRPOTrainer and DPOTrainer runs as it is; a stand-in gives it the options and the logprobs, so no
model is needed.
Largest difference with TRL 1.16.0 in float64: 1.4e-16 in the loss, 0 in the gradients; 2.2e-16 and 2.8e-17
with the KL; 2.7e-15 and 1.1e-15 for DPO.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

from sluice.consumers.training.policy.dpo import PairTerm
from sluice.consumers.training.policy.loss import aggregation, policy_loss
from sluice.pipeline.config.types import CONVENTIONS, PolicyConfig
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.trainers import random_sample

MOST = 1e-14
LENGTHS = (5, 9, 1, 12, 7, 9)
TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


def trl_loss(data: dict[str, torch.Tensor], options: PolicyConfig, logp: torch.Tensor, most: int) -> torch.Tensor:
    high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
    args = SimpleNamespace(delta=options.dual_clip, use_bias_correction_kl=False)
    stand_in = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        importance_sampling_level="token",
        epsilon_low=options.clip_eps,
        epsilon_high=high,
        beta=options.kl_coef,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=most,
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    vars(stand_in).update(TRL[options.loss])
    ids = torch.zeros_like(data["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": data["mask"].long(),
        "advantages": data["advantages"],
        "old_per_token_logps": data["proximal"],
        "importance_sampling_ratio": (data["proximal"] - data["behaviour"]).exp(),
        "num_items_in_batch": data["mask"].sum(),
        "ref_per_token_logps": data["reference"],
    }
    return GRPOTrainer._compute_loss(stand_in, None, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    ("name", "dual_clip"), [(name, clip) for name in TRL for clip in (None, 1.6) if name != "cispo" or clip is None]
)
def test_values_and_gradients_are_those_of_trl(name: str, dual_clip: float | None, kl_coef: float) -> None:
    drawn = torch.Generator().manual_seed(7)
    shape, most = (len(LENGTHS), max(LENGTHS)), 16

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(shape, generator=drawn, dtype=torch.float64)

    logp = -2 + noise(0.6)
    spread = 1e-3 if name == "gspo" else 0.7  # around its thresholds
    proximal = logp + noise(spread)
    data = {
        "proximal": proximal,
        "behaviour": proximal + noise(0.2),
        "reference": logp + noise(0.8),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64),
        "mask": torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None],
    }
    named = {**CONVENTIONS[name], "loss": name, "aggregation_tokens": most, "dual_clip": dual_clip}
    options = PolicyConfig(**named, kl_coef=kl_coef)  # in k3, which is TRL's
    theirs = logp.clone().requires_grad_()
    wanted = trl_loss(data, options, theirs, most)
    wanted.backward()
    divisor, shares = aggregation(LENGTHS, options)
    owner = torch.arange(len(LENGTHS))[:, None].expand(shape)
    ours = logp.clone().requires_grad_()
    sums = policy_loss(
        ours,
        data["proximal"],
        data["behaviour"],
        data["advantages"][:, None].expand(shape),
        data["mask"],
        options,
        shares=None if shares is None else shares[owner],
        sequences=owner,
        num_sequences=len(LENGTHS),
        reference=data["reference"],
    )
    got = (sums.loss + kl_coef * sums.kl) / divisor
    got.backward()
    assert theirs.grad is not None
    assert ours.grad is not None
    assert sums.capped == sums.floored == 0
    assert sums.clipped > 0 or name == "cispo"
    assert abs(got.item() - wanted.item()) <= MOST
    assert (ours.grad - theirs.grad).abs().max() <= MOST


def trl_dpo(logps: torch.Tensor, under: torch.Tensor, mask: torch.Tensor, beta: float) -> tuple[Any, dict[str, float]]:
    """Loss and metrics; the first half of the rows are the chosen ones, and column 0 is a prompt of one token."""
    zeros = torch.zeros_like(logps)
    outputs = SimpleNamespace(log_probs=logps * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    metrics: dict[str, list[float]] = defaultdict(list)
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics={"eval": metrics},
        _total_train_tokens=0,
    )
    chosen, rejected = (under * mask).sum(1).chunk(2)
    ids = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "completion_mask": torch.nn.functional.pad(mask.long(), (1, 0)),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(stand_in, lambda **_: outputs, inputs, False)  # type: ignore[arg-type]
    return loss, {name.removeprefix("rewards/"): values[-1] for name, values in metrics.items()}


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_on_the_pairs_of_groups_is_that_of_trl(beta: float) -> None:
    """Three groups, the best answers first; the tokens after a prompt of one."""
    drawn = torch.Generator().manual_seed(11)
    shape = (len(LENGTHS), max(LENGTHS))
    logps, under = (-2 + 0.4 * torch.randn(shape, generator=drawn, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    theirs = logps.clone().requires_grad_()
    wanted, metrics = trl_dpo(theirs, under, mask, beta)
    wanted.backward()
    samples, reference, rows = [], {}, {}
    for at, length in enumerate(LENGTHS):
        nothing = FloatArray([0.0] * (length + 1))
        sample = replace(
            random_sample(str(at), length + 1), group_id=str(at % 3), reward=float(at < 3), advantage=0.0,
            response_mask=Runs.of([0] + [1] * length), logprobs=nothing, proximal_logprobs=nothing,
        )  # fmt: skip
        samples.append(sample)
        reference[sample.seq_id] = np.array([np.nan, *under[at, :length].tolist()])
        rows[sample.seq_id] = [0.0, *logps[at, :length].tolist()]
    term = PairTerm(samples, PolicyConfig(enabled=True, loss="dpo", dpo_beta=beta), reference)
    term.prepare(lambda some: [rows[one.seq_id] for one in some])
    record = term.record()
    assert record["policy/dpo_pairs"] == 3
    assert abs(record["policy/loss"] - wanted.item()) <= MOST
    assert abs(record["policy/dpo_margin"] - metrics["margins"]) <= MOST
    assert record["policy/dpo_accuracy"] == pytest.approx(metrics["accuracies"])
    assert theirs.grad is not None
    slopes = torch.tensor([term.slopes[sample.seq_id] for sample in samples], dtype=torch.float64)
    assert (mask * slopes[:, None] - theirs.grad).abs().max() <= MOST
