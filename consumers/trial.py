"""`sluice task try`: the first rows through the run's own code, on a model in this process; nothing else is started.

    rows ─▶ jobs (producers) ─▶ answers (workers) ─▶ parse · match ─▶ rewards ─▶ samples

- Every step is that of the run's roles, so what is shown is what a run would do with the same model and seed.
- Each answer stands for itself: one that fails doesn't take its group along, whatever `consumer.on_incomplete_group`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import replace

from sluice.consumers.groups import Assembler, Group
from sluice.consumers.pack import ce_weights
from sluice.consumers.rewards import Refused, Reward, Rewards
from sluice.consumers.samples import Sampler, image_token_of
from sluice.consumers.tasks.registry import open_task
from sluice.consumers.tasks.rollout import answer_ids
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import RequestError
from sluice.pipeline.run import preflight
from sluice.pipeline.status.text import counted
from sluice.pipeline.terminal import say
from sluice.pipeline.user_modules import installed
from sluice.pipeline.wire.messages import DeadLetter, DecodeJob, SequenceResult, TrainingSample

_SHOWN = 400  # characters of a prompt or a value; answers are shown whole
_SHIFT = " " * 13


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer on its way to a sample."""

    seq_id: str
    text: str
    finish_reason: str
    num_tokens: int
    parsed: str = ""  # what the steps returned, as Python writes it; "" where they failed
    matched: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    advantage: float | None = None
    trained_tokens: int = 0  # with a weight or an advantage
    reason: str = ""  # why it gives no sample
    detail: str = ""


class TriedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its answers."""

    row: str  # its id, or what stands for it
    prompt: str
    truth: Any = None
    answers: list[Answer] = []
    problem: str = ""  # why nothing was decoded


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Printed by `sluice task try --json`."""

    schema_version: int = 1
    model: str
    task: str
    rows: list[TriedRow]
    failed: int  # answers without a sample, and rows without an answer


def try_rows(config: Config, rows: int, answers: int | None) -> Tried:
    """Decode the first rows and run everything on them. Raises SluiceError before anything is loaded."""
    preflight.model(config, needed=True)
    if answers is not None:
        config = replace(config, producer=replace(config.producer, group_size=answers))
    task, context = open_task(config)
    rewards = Rewards(config.rollout_matching, context.codec)
    jobs = cast("list[DecodeJob]", installed("sluice.checks", "jobs")(config, rows))
    if not jobs:
        raise preflight.no_rows(config.data.path)
    try:
        found = asyncio.run(_tried(config, jobs, task, context, rewards))
    finally:
        rewards.close()
    failed = sum(bool(row.problem) + sum(bool(one.reason) for one in row.answers) for row in found)
    return Tried(model=config.model.path, task=task.name, rows=found, failed=failed)


async def _tried(
    config: Config, jobs: list[DecodeJob], task: Task, context: TaskContext, rewards: Rewards
) -> list[TriedRow]:
    alone = replace(config.consumer, on_incomplete_group=cast("Literal['train_partial']", "train_partial"))
    sampler = Sampler(task, context, alone, image_token_of(config.model))
    opened = installed("sluice.engines", "jobs")(config)
    async with cast("AbstractAsyncContextManager[Any]", opened) as decode:
        return [await _row(job, decode, sampler, task, context, rewards) for job in jobs]


async def _row(
    job: DecodeJob, decode: Any, sampler: Sampler, task: Task, context: TaskContext, rewards: Rewards
) -> TriedRow:
    name = str(job.metadata["row"])
    try:
        results = cast("list[SequenceResult]", await decode(job))
    except RequestError as error:
        return TriedRow(row=name, prompt=str(job.messages), truth=job.truth, problem=str(error))
    assembler, group = Assembler(), None
    for at, result in enumerate(results):
        group = assembler.add_result(str(at), result)
    assert isinstance(group, Group)
    asked = [result for result in results if rewards and sampler.is_scored(result)]
    scores = dict(zip((one.seq_id for one in asked), await asyncio.gather(*map(rewards.of, asked)), strict=True))
    samples, letters = await asyncio.to_thread(sampler.samples_of, group, scores)
    made = {one.seq_id: one for one in samples}
    dropped = {one.seq_id: one for one in letters}
    shown = [
        _answer(one, made.get(one.seq_id), dropped.get(one.seq_id), scores.get(one.seq_id), task, context)
        for one in results
    ]
    prompt = context.codec.decode(results[0].prompt_token_ids)
    return TriedRow(row=name, prompt=prompt, truth=job.truth, answers=shown)


def _answer(
    result: SequenceResult,
    sample: TrainingSample | None,
    letter: DeadLetter | None,
    score: Reward | Refused | None,
    task: Task,
    context: TaskContext,
) -> Answer:
    parsed, matched = _steps(result, score, task, context)
    ids = answer_ids(result, context.codec)
    about: dict[str, Any] = {"parsed": parsed, "matched": matched}
    if sample is not None:
        mask = sample.response_mask.expand() if sample.advantage is not None else []
        weighed = int((ce_weights(sample) != 0).sum())
        about |= {"reward": sample.reward, "advantage": sample.advantage, "trained_tokens": max(weighed, sum(mask))}
    if isinstance(score, Reward):
        about |= {"reward_parts": score.parts, "reward": score.total}
    if letter is not None:
        about |= {"reason": letter.reason, "detail": letter.detail}
    return Answer(
        seq_id=result.seq_id,
        text=context.codec.decode(ids),
        finish_reason=result.finish_reason,
        num_tokens=len(ids),
        **about,
    )


def _steps(result: SequenceResult, score: Reward | Refused | None, task: Task, context: TaskContext) -> tuple[str, str]:
    """What parse and match return; what fails here has failed in the sampler too, which says why."""
    if isinstance(score, Reward):
        result = replace(result, reward=score.total)
    parsed = ""
    try:
        found = task.parse(result, context)
        parsed = repr(found.value) + ("" if found.valid else " (not valid)")
        matched = task.match(found, result.truth, context).value
        return parsed, "" if matched is None else repr(matched)
    except Exception:  # steps are the user's code
        return parsed, ""


def print_tried(tried: Tried) -> None:
    """One block a row."""
    for number, row in enumerate(tried.rows, 1):
        say(f"row {number} of {len(tried.rows)}: {_short(row.row)}")
        _line("prompt", _short(row.prompt))
        if row.truth is not None:
            _line("truth", _short(repr(row.truth)))
        if row.problem:
            _line("problem", row.problem)
        for at, answer in enumerate(row.answers):
            _print_answer(at, answer)
        say()
    answers = [answer for row in tried.rows for answer in row.answers]
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    lost = Counter(answer.reason for answer in answers if answer.reason)
    parts = [f"{counted(len(tried.rows), 'row')}, {counted(len(answers), 'answer')}, task {tried.task}"]
    if rewards:
        parts.append(f"mean reward {statistics.fmean(rewards):.4g}")
    parts += [f"{count} dropped: {reason}" for reason, count in lost.items()]
    say("; ".join(parts))


def _print_answer(at: int, answer: Answer) -> None:
    say(f"  answer {at}, {counted(answer.num_tokens, 'token')}, {answer.finish_reason}")
    _line("text", answer.text)
    for name in ("parsed", "matched"):
        if value := getattr(answer, name):
            _line(name, "the text" if value == repr(answer.text) else _short(value))
    if answer.reward is not None:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in answer.reward_parts.items())
        _line("reward", f"{answer.reward:.4g}" + (f" ({parts})" if parts else ""))
    if answer.reason:
        _line("dropped", f"{answer.reason}: {answer.detail}")
    else:
        advantage = "" if answer.advantage is None else f", advantage {answer.advantage:+.4g}"
        _line("trained", f"{counted(answer.trained_tokens, 'token')}{advantage}")


def _line(name: str, text: str) -> None:
    first, *rest = text.splitlines() or [""]
    say(f"    {name:<8} {first}")
    for line in rest:
        say(_SHIFT + line)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} … ({len(text)} characters)"
