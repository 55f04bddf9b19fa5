"""The evaluator of a run: every few versions it has held-out prompts decoded under one version, and scores the answers.

| waits for                 | unblocked by                                             |
|---------------------------|----------------------------------------------------------|
| the evaluator's role      | its last holder's end                                    |
| a version that is due     | the trainer, or its end                                  |
| answers                   | workers; `eval.wait_s` without any ends the evaluator    |

- A version is due `eval.every` after the one before it; if several are, the newest. The first, unless it is
  gone, and the last always are.
- A version under evaluation stays on disk: its number is in the broker before the trainer could retire it.
- Its jobs are pinned: an answer that isn't wholly of that version counts as failed, and there is none.
- An answer is in the evaluation's file before the broker forgets it, and a job's id names version, row and questions.
  So a killed evaluator goes on where it was, and each answer counts once.
- Nothing of it is trained or holds credit: the queue counts its sequences as `evaluated`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from sluice.consumers.evaluation.questions import Place, Questions, asking, read
from sluice.consumers.evaluation.results import FOLDER, Answer, Answers, Result, Results, prune, summary
from sluice.consumers.groups import Group
from sluice.consumers.rewards import Refused, Reward, Rewards
from sluice.consumers.samples import Sampler, image_token_of
from sluice.consumers.tasks.registry import open_task
from sluice.consumers.tasks.rollout import answer_ids
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config, PolicyConfig
from sluice.pipeline.errors import DeadlineExceeded, MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.status.evaluation import store_evaluation
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, decode
from sluice.pipeline.wire.waits import WaitKind

_PAGE, _POLL_S, _BLOCK_MS = 128, 0.2, 200
_LOST_S = 10.0  # without an answer: are the jobs still there?
_FIRST = 0  # version
_MIXED = "mixed_versions"
_NOT_SAMPLED = -1  # the version of tool output, and of a forced end
_OVER = ("finished", "stopped")  # the trainer's last words
_MOST_TOKENS = 2**31 - 1


class _Cut(Exception):
    """The version under evaluation is gone."""


async def evaluate(config: Config) -> None:
    """Run the evaluator until the run's last version is evaluated, or no prompts are held out."""
    if not config.eval.data:
        get_logger().info("eval.data is not set: nothing is held out")
        return
    rows = await asyncio.to_thread(read, config)
    task, context = open_task(config)
    rewards = Rewards(config.rollout_matching, context.codec)
    try:
        async with role_process(config, "evaluator", default_name("evaluator")) as role:
            owner = Ownership(role.client, role.keys, "evaluator")
            await owner.acquire(deadline_s=60, waiting=role.status.waiting)
            role.spawn(owner.keep())
            async with Trackers(config, part="eval") as trackers, asking(role, rows) as questions:
                await Evaluator(role, owner, questions, Judge(config, task, context, rewards), trackers).run()
            await owner.release()
    finally:
        rewards.close()


class Judge:
    """Scores an answer with the run's own reward functions and task, and without what only shapes the training."""

    def __init__(self, config: Config, task: Task, context: TaskContext, rewards: Rewards) -> None:
        usual = PolicyConfig()
        shaped = ("zero_variance", "mask_truncated", "overlong_tokens", "overlong_buffer")
        policy = replace(context.policy, **{name: getattr(usual, name) for name in shaped})
        alone = replace(config.consumer, on_incomplete_group="train_partial", max_sample_tokens=_MOST_TOKENS)
        context = TaskContext(context.codec, replace(context.options, gt_only_fraction=0.0), context.seed, policy)
        self._sampler = Sampler(task, context, alone, image_token_of(config.model))
        self._codec, self._rewards = context.codec, rewards

    async def of(self, found: Sequence[tuple[Place, SequenceResult]]) -> list[Answer]:
        """One per result, in order."""
        asked = [result for _, result in found if self._rewards and self._sampler.is_scored(result)]
        said = await asyncio.gather(*(self._rewards.of(result) for result in asked))
        scores = {result.seq_id: one for result, one in zip(asked, said, strict=True)}
        return await asyncio.to_thread(lambda: [self._answer(place, result, scores) for place, result in found])

    def _answer(self, place: Place, result: SequenceResult, scores: Mapping[str, Reward | Refused]) -> Answer:
        samples, letters = self._sampler.samples_of(Group(result.group_id, 1, {(0, 0): result}, parts={0: 1}), scores)
        if not samples:
            get_logger().warning("an answer was not scored", sequence=result.seq_id, reason=letters[0].reason)
            return Answer(row=place[0], index=place[1], failed=letters[0].reason)
        return Answer(
            row=place[0],
            index=place[1],
            text=self._codec.decode(answer_ids(result, self._codec)),
            transcript="" if result.rollout_id is None else self._codec.decode(result.token_ids),
            finish_reason=result.finish_reason,
            num_tokens=len(result.token_ids),
            reward=samples[0].reward,
            metrics=samples[0].metrics,
        )


class Evaluator:
    """The run's only evaluator."""

    def __init__(self, role: Role, owner: Ownership, questions: Questions, judge: Judge, trackers: Trackers) -> None:
        self._role, self._owner, self._judge, self._trackers = role, owner, judge, trackers
        self._config, self._options = role.config, role.config.eval
        self._questions = questions
        self._client: Any = role.client
        self._registry = WeightsRegistry(role.client, role.keys)
        self._dir = Path(role.config.run_dir) / role.config.run
        self._results = Results(self._dir, self._options)
        self._state = self._results.state()

    async def run(self) -> None:
        """Until the last version is evaluated, nothing gets better any more, or a stop is requested."""
        unfinished = await self._unfinished()
        await asyncio.to_thread(self._results.store_best, self._state)  # a killed evaluator may not have got there
        await self._store()
        while not self._role.stop.is_set() and not self._state.stops:
            version = unfinished if unfinished is not None else await self._due()
            unfinished = None
            if version is None:
                break
            try:
                await self._evaluate(version)
            except _Cut:
                get_logger().error("evaluation cut off: its version is gone", version=version)
        if self._state.stops:
            get_logger().warning("the run stops", cause=self._state.stops)

    async def _unfinished(self) -> int | None:
        """The version that a killed evaluator was at, if it is still there."""
        held = (await snapshot(self._role.client, self._role.keys)).evaluation.running
        if held is None or held in self._results.versions or await self._registry.get(held) is None:
            return None
        self._state = replace(self._state, running=held)
        return held

    async def _due(self) -> int | None:
        """The next version to evaluate, held; None at the end of the run or at a stop."""
        while not self._role.stop.is_set():
            now = await snapshot(self._role.client, self._role.keys)
            if is_over := now.state in _OVER:  # a version may have come between the two answers
                now = await snapshot(self._role.client, self._role.keys)
            latest, last = now.latest_version, self._results.last
            if last is None and latest and await self._hold_first():
                return _FIRST
            is_new = latest not in self._results.versions
            if latest is not None and is_new and (is_over or last is None or abs(latest - last) >= self._options.every):
                self._state = replace(self._state, running=latest)
                await self._store()
                # It is the newest after the trainer could see that it is held: see Session._register.
                if await self._registry.latest() == latest:
                    return latest
                continue
            if self._state.running is not None:  # a rollback came between the two looks
                self._state = self._results.state()
                await self._store()
            if is_over:
                return None
            self._role.status.waiting(WaitKind.NEXT_VERSION)
            if not await self._role.nap(_POLL_S):
                return None
        return None

    async def _hold_first(self) -> bool:
        """Hold the run's first version, which a fast trainer has left behind already; False if it is gone."""
        if await self._registry.get(_FIRST) is None:
            return False
        self._state = replace(self._state, running=_FIRST)
        await self._store()
        return await self._registry.get(_FIRST) is not None

    async def _evaluate(self, version: int) -> None:
        started = time.monotonic()
        answers = await asyncio.to_thread(Answers, self._dir / FOLDER, version, self._questions.digest)
        await self._collect(version, answers)
        if self._role.stop.is_set() and len(answers.found) < self._asked:
            return
        values = await asyncio.to_thread(summary, list(answers.found.values()), self._options, self._config.seed)
        values["eval/seconds"] = time.monotonic() - started
        manifest = await self._registry.get(version)
        await self._owner.confirm()
        await asyncio.to_thread(self._results.add, Result(version, time.time(), values))
        self._state = self._results.state()
        await asyncio.to_thread(self._results.store_best, self._state)
        await self._store()  # from here on the trainer may delete it, unless it is the best
        self._trackers.log((manifest and manifest.step) or 0, values)
        await asyncio.to_thread(prune, self._dir / FOLDER, self._options.keep_answers, -1)
        metric = self._state.metric
        get_logger().info(
            "evaluated", version=version, answers=len(answers.found), **{metric: values.get(f"eval/{metric}")}
        )

    @property
    def _asked(self) -> int:
        return len(self._questions) * self._options.n

    async def _collect(self, version: int, answers: Answers) -> None:
        """Ask what isn't answered, and store the answers, until all are there or a stop is requested."""
        rows = {self._questions.name(version, row): row for row in range(len(self._questions))}
        waiting, at_work = list(rows.values()), list[int]()
        heard = asked = time.monotonic()
        while not self._role.stop.is_set():
            taken = await self._take(version, answers, rows)
            waiting, at_work = ([row for row in some if self._missing(answers, [row])] for some in (waiting, at_work))
            self._state = replace(self._state, running=version, answered=len(answers.found), asked=self._asked)
            await self._store()
            if not waiting and not at_work:
                return
            now = time.monotonic()
            if taken:
                heard = asked = now
                continue  # all that is there, before a job whose answers it holds is enqueued again
            if now - heard > self._options.wait_s:
                raise DeadlineExceeded(
                    f"no answer to held-out prompts for {self._options.wait_s:.0f} s (eval.wait_s), {len(at_work)} "
                    f"prompts under v{version} are open: are workers alive? See `sluice status`"
                )
            if now - asked > _LOST_S:  # a broker that lost its last seconds may have lost some of them
                asked = now
                await self._ask(version, self._missing(answers, at_work))
            room = self._options.max_in_flight - len(at_work) * self._options.n
            count = max(room // self._options.n, 0 if at_work else 1)
            if chunk := waiting[:count]:
                await self._ask(version, self._missing(answers, chunk))
                at_work, waiting = at_work + chunk, waiting[count:]
            left = self._missing(answers, at_work)
            self._role.status.waiting(WaitKind.ANSWERS, f"v{version}", len(left))
            await self._client.xread({self._role.keys.evaluated: "0-0"}, count=1, block=_BLOCK_MS)
        self._role.status.waiting(None)

    def _missing(self, answers: Answers, rows: Sequence[int]) -> list[Place]:
        places = ((row, index) for row in rows for index in range(self._options.n))
        return [place for place in places if place not in answers.found]

    async def _ask(self, version: int, places: Sequence[Place]) -> None:
        done = await self._questions.ask(version, places)
        if not done:
            return
        if await self._client.xlen(self._role.keys.evaluated):
            return  # its answers may be there, and are read first
        get_logger().warning("answers to held-out prompts were lost; asking again", answers=len(done))
        await self._questions.forget(version, done)
        await self._questions.ask(version, done)

    async def _take(self, version: int, answers: Answers, rows: Mapping[str, int]) -> int:
        """Store the answers that are in the stream; returns how many entries there were."""
        stream = self._role.keys.evaluated
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await self._client.xrange(stream, count=_PAGE))
        if not entries:
            return 0
        self._role.status.waiting(None)
        found: list[tuple[Place, SequenceResult]] = []
        failed: list[Answer] = []
        for entry_id, fields in entries:
            try:
                place, one = _read(fields, rows, self._options.n)
            except (MessageError, KeyError, ValueError) as error:
                get_logger().warning("not an answer to what was asked; discarded", entry=entry_id, problem=str(error))
                continue
            if place in answers.found or place in {known for known, _ in found}:
                continue
            if isinstance(one, DeadLetter):
                if await self._registry.get(version) is None:
                    raise await self._cut(version, answers)
                get_logger().warning("a held-out prompt was not answered", sequence=one.seq_id, reason=one.reason)
                failed.append(Answer(row=place[0], index=place[1], failed=one.reason))
            elif any(each not in (version, _NOT_SAMPLED) for each in one.versions):
                get_logger().error(
                    "not decoded under its version alone", sequence=one.seq_id, versions=set(one.versions)
                )
                failed.append(Answer(row=place[0], index=place[1], failed=_MIXED))
            else:
                found.append((place, one))
        scored = await self._judge.of(found)
        await self._owner.confirm()
        await asyncio.to_thread(answers.add, [*scored, *failed])
        await self._client.xdel(stream, *(entry_id for entry_id, _ in entries))
        return len(entries)

    async def _cut(self, version: int, answers: Answers) -> _Cut:
        await asyncio.to_thread(answers.remove)
        await self._questions.cancel(version)
        await self._client.delete(self._role.keys.evaluated)
        self._state = self._results.state()
        await self._store()
        return _Cut(version)

    async def _store(self) -> None:
        await self._owner.confirm()
        await store_evaluation(self._role.client, self._role.keys, self._state)
        state = self._state
        self._role.status.fact(
            version=state.running, answered=state.answered, asked=state.asked, evaluations=state.evaluations
        )


def _read(fields: Mapping[bytes, bytes], rows: Mapping[str, int], n: int) -> tuple[Place, SequenceResult | DeadLetter]:
    row, index = rows[fields[b"g"].decode()], int(fields[b"i"])
    if not 0 <= index < n:
        raise ValueError(f"index {index} of {n} answers")
    one = decode(SequenceResult, fields[b"r"]) if b"r" in fields else decode(DeadLetter, fields[b"d"])
    return (row, index), one
