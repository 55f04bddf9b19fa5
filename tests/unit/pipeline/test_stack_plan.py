"""Which processes `sluice up` starts."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.policy_types import PolicyConfig, ScorerConfig
from pipeline.config.types import Config, WorkerConfig
from pipeline.stack import plan

FILE = Path("config.json")
BASE = {"trainer", "producer", "consumer-0", "worker-0", "worker-1"}


def names(*, enabled: bool, scorers: int) -> set[str]:
    policy, scorer = PolicyConfig(enabled=enabled), ScorerConfig(count=scorers)
    return set(plan(Config(policy=policy, scorer=scorer, worker=WorkerConfig(count=2)), FILE))


def test_scorers_run_with_a_policy_loss_alone() -> None:
    assert names(enabled=False, scorers=2) == BASE
    assert names(enabled=True, scorers=2) == {*BASE, "scorer-0", "scorer-1"}
    assert names(enabled=True, scorers=0) == BASE


def test_a_scorer_is_the_score_command_on_the_same_configuration() -> None:
    command = plan(Config(policy=PolicyConfig(enabled=True)), FILE)["scorer-0"]
    assert command[-3:] == ["score", "-c", str(FILE)]
