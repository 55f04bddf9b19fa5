"""Configurations whose credit could run dry for ever are refused by name, before anything starts."""

from __future__ import annotations

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError

BASE = ["producer.samples_per_version=8", "producer.max_in_flight=16"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["producer.max_in_flight=7"], "max_in_flight 7 is below 8"),
        (["trainer.checkpoint_every=200000"], "may hold 1,600,016 sequences at once"),
        (["consumer.count=4", "producer.max_in_flight=11"], "max_in_flight 11 is below 12"),
        (["consumer.count=2", "producer.max_staleness=0"], "max_staleness 0 admits fewer than the 14"),
        (
            ["producer.group_size=2", "consumer.on_incomplete_group=train_partial", "producer.max_in_flight=8"],
            "max_in_flight 8 is below 9",
        ),
    ],
)
def test_too_little_credit_is_refused(changes: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, [*BASE, *changes], environ={})


@pytest.mark.parametrize(
    "changes",
    [
        ["producer.max_in_flight=8", "producer.max_staleness=0"],
        ["trainer.checkpoint_every=3"],
        ["trainer.publish_every=3", "producer.max_staleness=0"],
        ["consumer.count=2", "producer.max_in_flight=14"],
    ],
)
def test_just_enough_credit_is_accepted(changes: list[str]) -> None:
    assert load_config(None, [*BASE, *changes], environ={}).run == "default"
