"""Which groups can be opened, and what a finish adds up to."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.pipeline.config.types import PolicyConfig
from sluice.producers.gateway.apis.chat_completions import ChatRequest
from sluice.producers.gateway.apis.requests import in_rollout
from sluice.producers.gateway.apis.rollouts import FinishRequest, OpenRequest
from sluice.producers.gateway.chat import alone_in_group
from sluice.producers.gateway.refusals import Refusal


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"enabled": False}, ""),
        ({"enabled": True, "advantage": "reward"}, ""),
        ({"enabled": True, "advantage": "reinforce_pp"}, ""),
        ({"enabled": True, "advantage": "group_norm"}, "policy.advantage group_norm"),
        ({"enabled": True, "advantage": "rloo"}, "policy.advantage rloo"),
        ({"enabled": True, "advantage": "reward", "loss": "dpo"}, "policy.loss dpo"),
    ],
)
def test_a_group_of_one_is_named_where_it_trains_nothing(policy: dict[str, Any], named: str) -> None:
    why = alone_in_group(PolicyConfig(**policy))
    assert why.startswith(named)
    assert bool(why) == bool(named)


def test_named_rewards_add_up_unless_a_total_is_given() -> None:
    parts = {"right": 1.0, "short": -0.25}
    assert FinishRequest(final_status="COMPLETED", rewards=parts).total == 0.75
    assert FinishRequest(final_status="COMPLETED", reward=0.0, rewards=parts).total == 0.0
    assert FinishRequest(final_status="COMPLETED").total is None


@pytest.mark.parametrize("rewards", [{}, {"": 1.0}, {"a b": 1.0}, {"a": float("nan")}, {"a": "1"}, [1.0], 1.0])
def test_rewards_have_names_and_numbers(rewards: Any) -> None:
    with pytest.raises(ValidationError):
        FinishRequest(final_status="COMPLETED", rewards=rewards)


def test_what_a_rollout_is_opened_with_can_travel_and_is_small() -> None:
    for wrong in ({"truth": 2**64}, {"metadata": {"a": "\ud800"}}, {"metadata": {"a": "x" * 2**20}}, {"index": -1}):
        with pytest.raises(ValidationError):
            OpenRequest.model_validate(wrong)


def test_one_rollout_is_named() -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "rollout_id": "r"})
    assert in_rollout(body, header="r", url="r").rollout_id == "r"
    assert in_rollout(body).rollout_id == "r"
    for named in ({"header": "s"}, {"url": "s"}):
        with pytest.raises(Refusal, match="different rollouts"):
            in_rollout(body, **named)
