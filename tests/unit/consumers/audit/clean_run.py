"""A run as the pipeline stores it: true results, through the real consumer, fill and files. Nothing in it is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Matched, Task, TaskContext
from sluice.consumers.training.policy.proximal import fill, plan, score_jobs, scores_by_place
from sluice.consumers.training.step_log import KeptRollouts, StepLog
from sluice.pipeline.config.types import Config, ConsumerConfig, PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import (
    DeadLetter,
    SamplingParams,
    ScoreJob,
    ScoreResult,
    SequenceResult,
    TrainingSample,
)
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec
from tests.unit.consumers.audit.stored_run import PROMPT, Policy

NEWEST = 3
STORY = (0, 0, 1, 1, 2, 3)
TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)


class Versions:
    """Logprobs of every version, by plain passes in double precision."""

    def __init__(self, weights: Path) -> None:
        self._policies = [Policy(weights / f"v{version:06d}") for version in range(NEWEST + 1)]
        self._known = dict[tuple[int, tuple[int, ...], float], list[float]]()

    def logprobs(self, version: int, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        asked = version, tuple(token_ids), temperature
        if asked not in self._known:  # the runs of most tests are the same ones
            self._known[asked] = self._policies[version].logprobs(token_ids, temperature)
        return self._known[asked]


@dataclass(frozen=True)
class Recipe:
    """What kind of run it is; `version` is that of the trainer."""

    story: Sequence[int] = STORY  # versions of the tokens after the prompt; -1: a tool's, or forced
    rewards: Sequence[float | None] = (1.0, 0.0, 0.25, 0.0)
    version: int = NEWEST
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(enabled=True))
    on_incomplete_group: Any = "drop"
    scored: Sequence[int] = (0, 1)  # tokens that came with the score of an update's prefill, by place in the story
    answered: bool = True  # scorers are there
    filled: bool = True  # False: a hand-off
    dead: bool = False  # a member more, which died
    parts: int = 1  # of the first rollout
    temperature: float = 1.0
    target: Any = exact_answer.target
    history: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)  # of every result

    def config(self, directory: Path) -> Config:
        is_own = self.target is not exact_answer.target
        return Config(
            run_dir=str(directory.parent),
            run=directory.name,
            policy=self.policy,
            consumer=ConsumerConfig(on_incomplete_group=self.on_incomplete_group),
            rollout_matching=RolloutMatchingConfig(task="exact_answer", target="own:target" if is_own else None),
        )


def write_run(directory: Path, weights: Path, versions: Versions, recipe: Recipe) -> Config:
    """The run's files; its configuration as it would be stored."""
    config = recipe.config(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights").symlink_to(weights)
    context = TaskContext(tiny_codec("bytes"), config.rollout_matching, policy=config.policy)
    sampler = Sampler(Task("exact_answer", TASK.parse, TASK.match, recipe.target), context, config.consumer)
    kept, log = KeptRollouts(directory / "rollouts", None), StepLog(directory / "metrics.jsonl")
    recorder = Recorder(config, 0)
    for step, name in enumerate(("g", "h"), 1):
        group = _group(name, versions, recipe)
        samples, letters = sampler.samples_of(group)
        if recipe.history:
            recorder.note(group, samples, letters)
        kept.save(step, _filled(samples, versions, recipe) if recipe.filled else samples)
        log.append(step, version=recipe.version)
    asyncio.run(_settle(recorder))
    return config


async def _settle(recorder: Recorder) -> None:
    await recorder.flush()
    await recorder.close()


def _group(name: str, versions: Versions, recipe: Recipe) -> Group:
    size = len(recipe.rewards) + recipe.dead
    members: dict[tuple[int, int], SequenceResult | DeadLetter] = {}
    for index, reward in enumerate(recipe.rewards):
        parts = recipe.parts if index == 0 else 1
        for part in range(parts):
            members[index, part] = _result(name, index, size, versions, recipe, reward=reward, part=part, parts=parts)
    if recipe.dead:
        members[size - 1, 0] = DeadLetter(seq_id=f"{name}:{size - 1}", reason="expired")
    return Group(name, size, members, [str(at) for at in range(len(members))])


def _result(
    name: str, index: int, size: int, versions: Versions, recipe: Recipe, *, part: int, **about: Any
) -> SequenceResult:
    seq_id = f"{name}:{index}" + (f"/{part}" if part else "")
    draw, story = random.Random(seq_id), list(recipe.story)
    prompt, ids = ([draw.randrange(3, 250) for _ in range(count)] for count in (PROMPT, len(story)))

    def under(version: int, at: int) -> float:
        return versions.logprobs(version, prompt + ids, recipe.temperature)[PROMPT + at]

    behaviour = [under(version, at) if version >= 0 else 0.0 for at, version in enumerate(story)]
    scored = [at in recipe.scored and version >= 0 for at, version in enumerate(story)]
    is_processed = recipe.temperature != 1
    fields: dict[str, Any] = {
        "seq_id": seq_id,
        "prompt_token_ids": TokenArray(prompt),
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray(behaviour),
        "versions": Runs.of(story),
        "response_mask": Runs.of(int(version >= 0) for version in story),
        "proximal_logprobs": FloatArray(
            under(version + 1, at) if scored[at] else behaviour[at] for at, version in enumerate(story)
        ),
        "proximal_versions": Runs.of(version + 1 if scored[at] else -1 for at, version in enumerate(story)),
        "logprobs_mode": "processed_logprobs" if is_processed else "raw_logprobs",
        "sampling": SamplingParams(temperature=recipe.temperature),
        "timings": {"enqueued_at": 1000.0 + index},
        "task": "exact_answer",
        "part": part,
    }
    return sequence_result(name, index, size, **{**fields, **about, **recipe.changes})


def _filled(samples: list[TrainingSample], versions: Versions, recipe: Recipe) -> list[TrainingSample]:
    """As the trainer's fill leaves them; those that it drops are missing."""
    done: list[TrainingSample] = []
    for sample in samples:
        if sample.advantage is None:
            done.append(sample)
            continue
        line = Line.consecutive(recipe.version)
        made = plan(sample, line, recipe.policy, own_version=recipe.version)
        answers = [_answer(job, versions) for job in score_jobs(made, "r")] if recipe.answered else []
        own = versions.logprobs(recipe.version, list(sample.token_ids), sample.temperature)
        filled = fill(made, own, scores_by_place(made, answers), recipe.policy)
        if filled.sample is not None:
            done.append(filled.sample)
    return done


def _answer(job: ScoreJob, versions: Versions) -> ScoreResult:
    ids = [*job.prompt_token_ids, *job.token_ids]
    logprobs = versions.logprobs(job.version, ids, job.temperature)
    found = FloatArray([logprobs[len(job.prompt_token_ids) + position] for position in job.positions])
    return ScoreResult(seq_id=job.seq_id, scored_version=job.version, positions=job.positions, logprobs=found)


def own_advantages(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """A task that gives the advantage itself."""
    return replace(exact_answer.target(matched, ctx), reward=1.0, advantage=0.75)


def no_rewards(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """A task that leaves the rewards to the agent's side, which need not give one."""
    return replace(exact_answer.target(matched, ctx), reward=None)


def own_mask(matched: Matched, ctx: TaskContext) -> TrainingSample:
    """A task that trains no first token."""
    sample = exact_answer.target(matched, ctx)
    mask = sample.response_mask.expand()
    mask[sample.prompt_len] = 0
    return replace(sample, response_mask=Runs.of(mask))
