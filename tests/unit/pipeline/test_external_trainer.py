"""What a run starts, and refuses, when the trainer is a loop of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.run.stack import plan


def test_neither_the_trainer_nor_its_scorers_are_started() -> None:
    config = load_config(
        None, ["trainer.external=true", "policy.enabled=true", "policy.advantage=reward", "scorer.count=2"], {}
    )
    started = set(plan(config, Path("config.yaml")))
    assert {"producer", "consumer-0", "worker-0"} <= started
    assert not [name for name in started if name.startswith(("trainer", "scorer"))]


def test_a_limit_of_the_built_in_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_versions applies to the built-in trainer"):
        load_config(None, ["trainer.external=true", "trainer.max_versions=3"], {})
