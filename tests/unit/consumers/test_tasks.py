"""Tasks by name, steps by import path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.registry import TASKS, check_options, load_task
from sluice.pipeline.config.types import PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError
from tests.detection_rollouts import context
from tests.tiny_tokenizer import tiny_codec


def test_tasks_by_name() -> None:
    for name in TASKS:
        assert load_task(RolloutMatchingConfig(task=name)) is not None
    assert load_task(RolloutMatchingConfig()).name == "detection"


def test_one_step_is_replaced() -> None:
    task = load_task(RolloutMatchingConfig(parse="sluice.consumers.tasks.exact_answer:parse"))
    assert task.parse is exact_answer.parse
    assert task.match is TASKS["detection"].match


def test_a_task_of_your_own_needs_three_steps() -> None:
    steps: dict[str, Any] = {
        step: f"sluice.consumers.tasks.exact_answer:{step}" for step in ("parse", "match", "target")
    }
    assert load_task(RolloutMatchingConfig(task="mine", **steps)).name == "mine"
    with pytest.raises(ConfigError, match="also needs target"):
        load_task(RolloutMatchingConfig(task="mine", parse=steps["parse"], match=steps["match"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": "detektion"}, "did you mean 'detection'"),
        ({"parse": "consumers.nowhere:parse"}, "cannot import 'consumers.nowhere'"),
        ({"match": "sluice.consumers.tasks.exact_answer:mtch"}, "did you mean 'match'"),
        ({"target": "no_colon"}, "package.module:name"),
        ({"target": "sluice.consumers.tasks.exact_answer:SEARCHED_CHARS"}, "is not a function"),
    ],
)
def test_what_cannot_be_loaded_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_task(RolloutMatchingConfig(**fields))


def test_options_are_checked_at_start() -> None:
    ctx = context(tiny_codec(), matched_supervision="geometry")
    with pytest.raises(ConfigError, match="coord_0"):
        check_options(TASKS["detection"], ctx)
    check_options(TASKS["exact_answer"], ctx)


def test_a_policy_loss_needs_a_task_that_gives_rewards() -> None:
    ctx = replace(context(tiny_codec()), policy=PolicyConfig(enabled=True))
    with pytest.raises(ConfigError, match=r"no reward.*rollout_matching\.target"):
        check_options(load_task(RolloutMatchingConfig()), ctx)
    check_options(load_task(RolloutMatchingConfig(target="sluice.consumers.tasks.exact_answer:target")), ctx)
    check_options(TASKS["exact_answer"], ctx)
    check_options(TASKS["detection"], context(tiny_codec()))
