"""The task on the first rows, before anything starts: its functions import, and they give samples; the policy loss too.

No model decodes here. Each row gets made-up answers: its truth as text, a sentence, and none at all. A row passes when
one of them becomes a sample in the consumer's own code; the task is refused when no row passes. A few rows are tried,
and more only while each lacks something of its own, such as a truth. A function that didn't answer in time proves
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.groups import Group
from sluice.consumers.rewards import TIMEOUT, Rewards, reward_functions
from sluice.consumers.samples import HAS_IMAGES, Sampler, image_token_of
from sluice.consumers.tasks.registry import TASKS, load_task, open_task
from sluice.consumers.tasks.task import Task, TextCodec
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, TaskError, as_one
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.run.preflight import FirstRow, Note
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_NAME, _SENTENCE = "preflight", "The answer is 42."
_OF_DATA = ("invalid_truth", "too_long", HAS_IMAGES)
_FEW = 4
_Failure = tuple[FirstRow, DeadLetter]


def look_at_task(config: Config, rows: Sequence[FirstRow]) -> str:
    """Raises ConfigError, ModelError, and TaskError when no row gives a sample."""
    has_tokenizer = (Path(config.model.path) / "tokenizer.json").is_file()  # if not, the model's check says so
    problems: list[str] = []
    opened: list[Any] = []
    for load in (open_task if has_tokenizer else _load_task, _load_rewards, _load_loss):
        try:
            opened.append(load(config))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(as_one(problems))
    name = config.rollout_matching.task
    if not has_tokenizer:
        return Note(f"{name}: not tried, there is no tokenizer")
    if not rows:
        if not config.preflight.max_s:
            return Note(f"{name}: not tried (preflight.max_s 0)")
        return f"{name}: not tried, there is no usable row"
    (task, context), *_ = opened
    _check_length(config, context.codec, rows)
    sampler = Sampler(task, context, config.consumer, image_token_of(config.model))
    tried, failed = asyncio.run(_failures(sampler, context.codec, config, rows))
    return _verdict(name, tried, failed)


def _check_length(config: Config, codec: TextCodec, rows: Sequence[FirstRow]) -> None:
    """Raises ConfigError when no row can be decoded: its text alone, without a template, leaves too little room."""
    limit, wanted = Limits.of_model(config.model.path).context, config.sampling.max_new_tokens
    if limit is None or config.rollout.url:
        return
    least = min((size for row in rows if (size := _text_tokens(codec, row)) is not None), default=None)
    if config.sampling.truncate_prompt:
        least = 1
    if least is not None and least + wanted > limit:
        raise ConfigError(
            f"sampling.max_new_tokens {wanted} leaves no room for a prompt in the model's context of {limit} tokens "
            f"(the shortest of the first {_rows(len(rows))} has {least} without its template); lower it"
        )


def _text_tokens(codec: TextCodec, row: FirstRow) -> int | None:
    try:
        return len(codec.encode("\n".join(str(message.get("content", "")) for message in row.messages)))
    except (UnicodeEncodeError, TypeError):  # half of a character
        return None


def _load_task(config: Config) -> Task:
    return load_task(config.rollout_matching)


def _load_rewards(config: Config) -> None:
    for function in reward_functions(config.rollout_matching):
        function.close()


def _load_loss(config: Config) -> None:
    if config.policy.enabled and ":" in config.policy.loss:
        from sluice.consumers.training.policy.surrogate import (
            load_surrogate,  # torch: only a child of this start imports it
        )

        load_surrogate(config.policy)


def _verdict(name: str, count: int, failed: Sequence[_Failure]) -> str:
    if not failed:
        return f"{name}: the first {_rows(count)} can be trained"
    row, cause = failed[0]
    first = f"{row.where}: {cause.reason}: {cause.detail.removeprefix(f'{_NAME}:0: ').rstrip()}"
    if len(failed) < count or any(one.reason == TIMEOUT for _, one in failed):
        return Note(f"{name}: {len(failed)} of the first {_rows(count)} would be dropped; {first}")
    what = "data" if cause.reason in _OF_DATA else "task's functions"
    if cause.reason == "invalid_truth":
        what = "data, or name the task that they are for: rollout_matching.task " + ", ".join(sorted(TASKS))
        if name == "reward":  # it needs no truth
            what = "configuration: name a reward function, --reward my_rewards.py:score"
    raise TaskError(
        f"{name}: each of the first {_rows(count)} would be dropped; correct the {what} "
        f"(--set preflight.max_s=0 starts without this check); {first}"
    )


async def _failures(
    sampler: Sampler, codec: TextCodec, config: Config, rows: Sequence[FirstRow]
) -> tuple[int, list[_Failure]]:
    """How many rows were tried, and those that would be dropped."""
    rewards, failed, tried = Rewards(config.rollout_matching, codec), list[_Failure](), 0
    try:
        for tried, row in enumerate(rows, 1):
            if cause := await _failure(sampler, rewards, codec, config, row):
                failed.append((row, cause))
            if tried >= _FEW and (len(failed) < tried or any(one.reason not in _OF_DATA for _, one in failed)):
                break
    finally:
        rewards.close()
    return tried, failed


async def _failure(
    sampler: Sampler, rewards: Rewards, codec: TextCodec, config: Config, row: FirstRow
) -> DeadLetter | None:
    """None if one of the row's answers becomes a sample; else why the first doesn't."""
    letters: list[DeadLetter] = []
    for result in _results(codec, config, row):
        scored = {result.seq_id: await rewards.of(result)} if rewards and sampler.is_scored(result) else {}
        group = Group(result.group_id, 1, {(0, 0): result}, parts={0: 1})
        samples, dropped = sampler.samples_of(group, scored)
        if samples:
            return None
        letters += dropped
    return letters[0] if letters else None


def _results(codec: TextCodec, config: Config, row: FirstRow) -> Iterator[SequenceResult]:
    prompt = [str(message.get("content", "")) for message in row.messages]
    rewards = [None, 1.0] if config.rollout.url else [None]  # an agent's side may give one
    for text in _answers(row.truth):
        for reward in rewards:
            try:
                ids = [*codec.encode(text), codec.eos_token_ids[0]]
                asked = codec.encode("\n".join(prompt))
            except (UnicodeEncodeError, TypeError):  # half of a character
                continue
            yield SequenceResult(
                seq_id=f"{_NAME}:0",
                group_id=_NAME,
                group_size=1,
                index=0,
                reward=reward,
                prompt_token_ids=TokenArray(asked),
                token_ids=TokenArray(ids),
                logprobs=FloatArray([-1.0] * len(ids)),
                versions=Runs.of([0] * len(ids)),
                text=text,
                raw_text=text,
                finish_reason="stop",
                sampling=config.sampling,
                truth=row.truth,
                messages=row.messages,
                images=list(row.images),
                task=config.rollout_matching.task,
                metadata=row.metadata,
            )


def _answers(truth: Any) -> list[str]:
    answer = truth.get("answer") if isinstance(truth, dict) else truth
    if answer is None:
        return [_SENTENCE, ""]
    return [answer if isinstance(answer, str) else msgspec.json.encode(answer).decode(), _SENTENCE, ""]


def _rows(count: int) -> str:
    return "row" if count == 1 else f"{count} rows"
