"""The policy losses, KL estimators and advantages beside verl's published ones, on the same numbers in float64.

verl runs in a process of its own, on our torch, with only what its formulas import. REINFORCE++ is left out: verl
normalises it over tokens, Sluice over rollouts. GSPO is compared without the weights against staleness: verl applies
one to each token's gradient, Sluice and TRL to each token's loss, of which every token of the sequence has a share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.consumers.samples import group_advantages
from sluice.consumers.training.policy.loss import aggregation, policy_loss
from sluice.consumers.training.policy.reference import kl_estimate
from sluice.pipeline.config.types import CONVENTIONS, PolicyConfig
from tests.clients.environments import folder_with
from tests.deadlines import RUN_S

PACKAGES = (
    "verl==0.9.1", "tensordict==0.10.0", "ray==2.60.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3",
    "hydra-core==1.3.8", "codetiming==1.4.0", "torchdata==0.11.0", "msgpack==1.2.4", "pyvers==0.2.3", "orjson==3.13.0",
)  # fmt: skip
MOST = 1e-14
ADDED = 1e-8  # to the number of tokens of a sequence, in verl's mean over sequences
NO_BOUND = 1e9  # verl always has a dual clip
LENGTHS = (5, 9, 1, 12, 7, 9)
GROUPS = (0, 0, 0, 1, 1, 1)
MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
FUNCTIONS = {"gspo": "gspo", "cispo": "cispo"}
CASES = [
    (name, dual_clip)
    for name in CONVENTIONS
    for dual_clip in (None, 1.6)
    if name != "dpo" and (dual_clip is None or name not in FUNCTIONS)
]


def options_of(name: str, dual_clip: float | None) -> PolicyConfig:
    lower = {"clip_eps_high": 0.5} if name == "cispo" else {}  # its own is beyond all ratios here
    changed = {"loss": name, "aggregation_tokens": 16, "dual_clip": dual_clip, **lower}
    return PolicyConfig(**{**CONVENTIONS[name], **changed})


@pytest.fixture(scope="module")
def data() -> dict[str, torch.Tensor]:
    """Around the thresholds of both kinds of clip: the ratios of three sequences are near 1."""
    drawn, shape = torch.Generator().manual_seed(7), (len(LENGTHS), max(LENGTHS))

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(shape, generator=drawn, dtype=torch.float64)

    logp = -2 + noise(0.6)
    near = torch.tensor([1.0, 1e-3] * 3, dtype=torch.float64)[:, None]
    proximal = logp + noise(0.7) * near
    return {
        "logp": logp,
        "proximal": proximal,
        "behaviour": proximal + noise(0.2),
        "reference": logp + noise(0.8),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64),
        "rewards": torch.tensor([1.0, 0.0, 0.25, -3.0, 2.0, 0.5], dtype=torch.float64),
        "mask": (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double(),
    }


@pytest.fixture(scope="module")
def verl(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    losses = []
    for name, dual_clip in CASES:
        options = options_of(name, dual_clip)
        high = options.clip_eps if options.clip_eps_high is None else options.clip_eps_high
        losses.append(
            {
                "name": f"{name}-{dual_clip}", "function": FUNCTIONS.get(name, "vanilla"), "low": options.clip_eps,
                "high": high, "dual_clip": dual_clip or NO_BOUND, "mode": MODES[options.aggregation],
                "tokens": options.aggregation_tokens, "weighted": name != "gspo",
            }
        )  # fmt: skip
    numbers = {name: value.tolist() for name, value in data.items()}
    asked = {"data": numbers, "losses": losses, "kl": ["k1", "k2", "k3"], "groups": GROUPS}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "talks" / "verl_losses.py")],
        env={**os.environ, "PYTHONPATH": str(folder_with(*PACKAGES))},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "dual_clip"), CASES)
def test_losses_and_gradients(
    name: str, dual_clip: float | None, data: dict[str, torch.Tensor], verl: dict[str, Any]
) -> None:
    options, shape = options_of(name, dual_clip), data["logp"].shape
    divisor, shares = aggregation(LENGTHS, options)
    if options.aggregation == "sequence" and shares is not None:
        shares = shares * torch.tensor([length / (length + ADDED) for length in LENGTHS], dtype=shares.dtype)
    owner = torch.arange(len(LENGTHS))[:, None].expand(shape)
    logp = data["logp"].clone().requires_grad_()
    sums = policy_loss(
        logp,
        data["proximal"],
        data["proximal"] if name == "gspo" else data["behaviour"],
        data["advantages"][:, None].expand(shape),
        data["mask"].bool(),
        options,
        shares=None if shares is None else shares[owner],
        sequences=owner,
        num_sequences=len(LENGTHS),
    )
    loss = sums.loss / divisor
    loss.backward()
    theirs = verl["losses"][f"{name}-{dual_clip}"]
    assert sums.capped == sums.floored == 0
    assert theirs["clipped"] > 0
    assert loss.item() == pytest.approx(theirs["loss"], rel=MOST, abs=MOST)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor(theirs["gradient"], dtype=torch.float64), rtol=MOST, atol=MOST)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator: Any, data: dict[str, torch.Tensor], verl: dict[str, Any]) -> None:
    logp = data["logp"].clone().requires_grad_()
    kl = kl_estimate(logp, data["reference"], estimator)
    kl.sum().backward()
    theirs = {name: torch.tensor(value, dtype=torch.float64) for name, value in verl["kl"][estimator].items()}
    assert logp.grad is not None
    torch.testing.assert_close(kl.detach(), theirs["values"], rtol=MOST, atol=MOST)
    torch.testing.assert_close(logp.grad, theirs["gradient"], rtol=MOST, atol=MOST)


@pytest.mark.parametrize("kind", ["group_norm", "group_mean", "rloo"])
def test_advantages(kind: Any, data: dict[str, torch.Tensor], verl: dict[str, Any]) -> None:
    """verl's group norm divides by n - 1."""
    rewards = iter(data["rewards"].tolist())
    groups = [[next(rewards) for _ in members] for _, members in groupby(GROUPS)]
    ours = [value for group in groups for value in group_advantages(group, kind, "sample")]
    assert ours == pytest.approx(verl["advantages"][kind], rel=MOST, abs=MOST)
