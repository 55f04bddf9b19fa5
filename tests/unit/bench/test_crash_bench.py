"""`sluice bench crash`: what it calls equal, and two whole small runs, one of which is killed at every role once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.bench.crash import ROLES, Outcome, Plan, differing
from sluice.pipeline.errors import ConfigError
from tests.benches import left_behind, run_bench

SAMPLE = {"seq_id": "a:0", "token_ids": [1, 2], "versions": [0, 0], "logprobs": "00", "proximal_logprobs": "01"}
STEP = {"train/loss": 0.5, "policy/loss": 0.25, "train/grad_norm": 1.0, "policy/reward_mean": 0.0}


def ran(*samples: dict[str, Any], weights: str = "v000001 abc", policy_loss: float = 0.25) -> Outcome:
    step = {**STEP, "policy/loss": policy_loss, "samples": samples or (SAMPLE,)}
    return Outcome(1.0, [step], weights, 2, 1)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ran({**SAMPLE, "token_ids": [1, 3]}), "step 1: token_ids of a:0"),
        (ran({**SAMPLE, "seq_id": "b:0"}), "step 1: seq_id of a:0"),
        (ran({**SAMPLE, "proximal_logprobs": "02"}), "step 1: proximal_logprobs of a:0"),
        (ran(SAMPLE, SAMPLE), "step 1: 1 samples and 2"),
        (ran(weights="v000001 abd"), "weights v000001 abc and v000001 abd"),
        (ran(policy_loss=0.2500000000000001), "step 1: policy/loss 0.25 and 0.2500000000000001"),
        (Outcome(1.0, [], "v000001 abc", 0, 0), "1 steps and 0"),
    ],
)
def test_one_bit_makes_a_difference(other: Outcome, words: str) -> None:
    assert differing(ran(), ran()) == []
    assert words in differing(ran(), other)


def test_counts_are_checked() -> None:
    with pytest.raises(ConfigError, match="--kills"):
        Plan.of(kills=-1)


def test_a_run_with_each_role_killed_is_bitwise_equal_to_one_without(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "crash", "--quick")
    assert found["differences"] == []
    assert found["bitwise_equal"] is True
    assert found["kills"] == Plan.QUICK["kills"] == sum(found["kills_by_role"].values())
    assert all(found["kills_by_role"][role] for role in ROLES), found["kills_by_role"]
    assert found["kills_between"], "no trainer died between a version and its checkpoint"
    assert 0 <= found["extra_tokens_share"] <= found["extra_tokens_share_most"] < 1
    assert found["sequences"] == 48
    assert left_behind(tmp_path) == ["model"]
