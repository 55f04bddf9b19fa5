"""The tasks, and how a config replaces their steps by import path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.consumers.tasks import exact_answer, reward
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.detection import match as detection_match
from sluice.consumers.tasks.detection import parse as detection_parse
from sluice.consumers.tasks.detection import target as detection_target
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.config.types import Config, RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError, as_one
from sluice.pipeline.user_modules import load_object

TASKS = {
    "detection": Task("detection", detection_parse.parse, detection_match.match, detection_target.target),
    "exact_answer": Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target),
    "reward": Task("reward", exact_answer.parse, reward.match, reward.target),
}
_REWARDED = {
    "detection": Task("detection", detection_parse.parse, detection_match.match, reward.target),
    "exact_answer": Task("exact_answer", exact_answer.parse, reward.match, reward.target),
}
"""The tasks that judge an answer themselves, where a reward function does."""

_STEPS = ("parse", "match", "target")


def load_task(options: RolloutMatchingConfig) -> Task:
    """The configured task, with the steps that the config replaces.

    A new task name needs all three import paths. Raises ConfigError for an unknown task or a failed import.
    """
    known = TASKS if options.reward is None else TASKS | _REWARDED
    base = known.get(options.task)
    own = {step: getattr(options, step) for step in _STEPS}
    missing = [step for step, path in own.items() if path is None]
    if base is None and missing:
        raise ConfigError(
            f"rollout_matching.task: unknown task {options.task!r}; {did_you_mean(options.task, list(TASKS))}"
            f" Your own task also needs {', '.join(missing)} as module:function"
        )
    steps: dict[str, Any] = {}
    problems: list[str] = []
    for step, path in own.items():
        try:
            steps[step] = getattr(base, step) if path is None else _load(path, f"rollout_matching.{step}")
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(as_one(problems))
    return Task(options.task, **steps)


def open_task(config: Config) -> tuple[Task, TaskContext]:
    """The run's task and what its steps share. Raises ConfigError; ModelError without a usable tokenizer."""
    task = load_task(config.rollout_matching)
    codec = HFTextCodec(Path(config.model.path))
    context = TaskContext(codec=codec, options=config.rollout_matching, seed=config.seed, policy=config.policy)
    check_options(task, context)
    return task, context


def check_options(task: Task, ctx: TaskContext) -> None:
    """Raises ConfigError at start if the task's options don't fit the tokenizer or the policy loss."""
    own = ctx.options.reward is not None  # then load_config refuses a policy that is off
    if task.target is reward.target and not (ctx.policy.enabled or own):
        raise ConfigError(
            "rollout_matching.task reward trains through the policy loss alone; set policy.enabled to true"
        )
    if task.target is detection_target.target:
        if ctx.policy.enabled:
            raise ConfigError(
                "policy.enabled: the target of the detection task sets no reward, so nothing would train the policy; "
                "set rollout_matching.target to your own function that does, or switch the policy loss off"
            )
        detection_target.check_options(ctx)


def _load(path: str, key: str) -> Callable[..., Any]:
    step = load_object(path, key)
    if not callable(step):
        raise ConfigError(f"{key}: {path!r} is not a function; name one")
    return step
