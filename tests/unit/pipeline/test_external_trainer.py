"""What a run starts, and refuses, when the trainer is a loop of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.config.rules import own_loop_warnings
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.run.stack import plan


def test_neither_the_trainer_nor_its_scorers_are_started() -> None:
    config = load_config(
        None, ["trainer.external=true", "policy.enabled=true", "policy.advantage=reward", "scorer.count=2"], {}
    )
    started = set(plan(config, Path("config.yaml")))
    assert {"producer", "consumer-0", "worker-0"} <= started
    assert not [name for name in started if name.startswith(("trainer", "scorer"))]


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ([], None),
        (["policy.kl_coef=0.1", "policy.mismatch=mask"], "policy.kl_coef 0.1, policy.mismatch mask"),
        (["policy.loss=dpo", "trainer.minibatches=2"], "policy.loss dpo, trainer.minibatches 2"),
        (["policy.loss=dpo", "policy.zero_variance=filter"], None),  # consumers then filter by pairs
        (["policy.loss=dr_grpo"], None),  # sets the advantage
        (["policy.loss=mine.py:loss"], "policy.loss mine.py:loss"),
        (["policy.enabled=false", "policy.kl_coef=0.1", "trainer.minibatches=2"], "trainer.minibatches 2"),
    ],
)
def test_what_the_own_loop_ignores_is_told(changes: list[str], listed: str | None) -> None:
    usual = ["policy.enabled=true", "producer.group_size=4", "producer.samples_per_version=8", *changes]
    told = own_loop_warnings(load_config(None, [*usual, "trainer.external=true"], {}))
    assert [line.partition(": without effect, since trainer.external is true")[0] for line in told] == (
        [] if listed is None else [listed]
    )
    assert own_loop_warnings(load_config(None, usual, {})) == []


def test_a_limit_of_the_built_in_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_versions applies to the built-in trainer"):
        load_config(None, ["trainer.external=true", "trainer.max_versions=3"], {})
