"""What an evaluation asks under one version: prompts, as decode jobs, or rows that agents answer, as rollouts.

    read ─▶ Questions ─ ask(version, places) ─┬─ DecodeJobs ───────────────────────────▶ workers ─┬─▶ stream `evaluated`
                                              └─ rollouts ─▶ rollout server ─▶ gateway ─▶ workers ─┘

- An id names version, row and questions, so asking again asks nothing twice, whoever asked before.
- Every turn of a rollout is decoded under the version, as a job is. Of a forked one the newest branch is the answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from sluice.pipeline.config.rules import eval_config
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError
from sluice.pipeline.queue import NO_LIMIT, JobQueue
from sluice.pipeline.queue.rollouts import RolloutHead, Rollouts
from sluice.pipeline.run.role import Role
from sluice.pipeline.user_modules import installed
from sluice.pipeline.wire.keys import evaluated_group, evaluated_job
from sluice.pipeline.wire.messages import EVALUATION, DecodeJob

Rows = Sequence[DecodeJob] | Sequence[Sequence[RolloutHead]]
"""The held-out rows, without a version."""
Place = tuple[int, int]
"""Of an answer: its row, and its index among the row's `eval.n`."""


def read(config: Config) -> Rows:
    """Blocks, not on an event loop; raises DataError."""
    kind = "jobs" if config.rollout.url is None else "heads"
    found = cast("Any", installed("sluice.checks", kind))(eval_config(config), sys.maxsize)
    if not found:
        raise DataError(f"{config.eval.data}: no rows; name held-out prompts in eval.data, or leave it out")
    return cast(Rows, found)


class Questions(Protocol):
    """Each row is asked `eval.n` times."""

    digest: str  # of everything that is asked, and how

    def __len__(self) -> int:
        """How many rows."""
        ...

    def name(self, version: int, row: int) -> str:
        """What the row's answers are named by in the stream."""
        ...

    async def ask(self, version: int, places: Sequence[Place]) -> list[Place]:
        """Returns those that were answered before."""
        ...

    async def forget(self, version: int, places: Sequence[Place]) -> None:
        """That they were answered."""
        ...

    async def cancel(self, version: int) -> None:
        """All that is asked."""
        ...


@contextlib.asynccontextmanager
async def asking(role: Role, rows: Rows) -> AsyncGenerator[Questions]:
    """Inside the block they can be asked. Raises DeadlineExceeded, ConfigError if nobody could answer rollouts."""
    if role.config.rollout.url is None:
        yield Prompts(role, cast("Sequence[DecodeJob]", rows))
        return
    rollouts = Rollouts.of(role.client, role.keys, role.config)
    opened = cast("Any", installed("sluice.rollouts", "evaluated"))(role, rollouts)
    async with cast("AbstractAsyncContextManager[Dispatcher]", opened) as dispatcher:
        yield AgentRows(role, cast("Sequence[Sequence[RolloutHead]]", rows), rollouts, dispatcher)


class Prompts:
    """A decode job for each row, which is answered as a whole."""

    def __init__(self, role: Role, jobs: Sequence[DecodeJob]) -> None:
        self._run, self._priority, self._jobs = role.config.run, role.config.eval.priority, jobs
        self._queue = JobQueue(role.client, role.keys, partitions=role.config.consumer.count)
        self.digest = _digest(
            (job.job_id, job.n, job.messages, job.images, job.sampling, job.truth, job.task) for job in jobs
        )

    def __len__(self) -> int:
        return len(self._jobs)

    def name(self, version: int, row: int) -> str:
        return evaluated_job(self._run, version, row, self.digest)

    async def ask(self, version: int, places: Sequence[Place]) -> list[Place]:
        rows = _rows(places)
        outcomes = await self._queue.enqueue([self._job(version, row) for row in rows], NO_LIMIT)
        done = {row for row, outcome in zip(rows, outcomes, strict=True) if outcome == "done"}
        return [place for place in places if place[0] in done]

    async def forget(self, version: int, places: Sequence[Place]) -> None:
        for row in _rows(places):
            await self._queue.forget(self.name(version, row), self._jobs[row].n)

    async def cancel(self, version: int) -> None:
        await self._queue.cancel([self.name(version, row) for row in range(len(self))])

    def _job(self, version: int, row: int) -> DecodeJob:
        job = self._jobs[row]
        return replace(
            job,
            job_id=self.name(version, row),
            priority=self._priority,
            pinned_version=version,
            reply_to=EVALUATION,
            metadata={**job.metadata, "evaluated": version},
        )


class Dispatcher(Protocol):
    """The part of the producers' one that is needed: this package doesn't import them."""

    def ask(self, heads: Iterable[RolloutHead]) -> None:
        """Have the rollout server answer them; those that are being answered are left out."""
        ...

    def leave(self) -> None:
        """Ask for nothing any more that isn't answered yet."""
        ...


class AgentRows:
    """A group of rollouts for each row."""

    def __init__(
        self, role: Role, groups: Sequence[Sequence[RolloutHead]], rollouts: Rollouts, dispatcher: Dispatcher
    ) -> None:
        self._run, self._priority, self._groups = role.config.run, role.config.eval.priority, groups
        self._rollouts, self._dispatcher = rollouts, dispatcher
        self.digest = _digest(
            (head.rollout_id, head.request, head.truth, head.task) for group in groups for head in group
        )

    def __len__(self) -> int:
        return len(self._groups)

    def name(self, version: int, row: int) -> str:
        return evaluated_group(self._run, version, row, self.digest)

    async def ask(self, version: int, places: Sequence[Place]) -> list[Place]:
        heads = [self._head(version, place) for place in places]
        outcomes = await self._rollouts.open(heads)
        self._dispatcher.ask(head for head, outcome in zip(heads, outcomes, strict=True) if outcome != "done")
        return [place for place, outcome in zip(places, outcomes, strict=True) if outcome == "done"]

    async def forget(self, version: int, places: Sequence[Place]) -> None:
        for place in places:
            await self._rollouts.forget(self._head(version, place).rollout_id)

    async def cancel(self, version: int) -> None:
        self._dispatcher.leave()
        for place in ((row, index) for row, group in enumerate(self._groups) for index in range(len(group))):
            rollout_id = self._head(version, place).rollout_id
            await self._rollouts.drop(rollout_id, "cancelled", "the evaluation was cut off")

    def _head(self, version: int, place: Place) -> RolloutHead:
        row, index = place
        head, group = self._groups[row][index], self.name(version, row)
        name = f"{group}:{index}"
        return replace(
            head,
            rollout_id=name,
            group_id=group,
            request={**head.request, "rollout_id": name},
            pinned_version=version,
            priority=self._priority,
            metadata={**head.metadata, "evaluated": version},
        )


def _rows(places: Iterable[Place]) -> list[int]:
    return list(dict.fromkeys(row for row, _ in places))


def _digest(asked: Iterable[Any]) -> str:
    digest = sha256()
    for each in asked:
        digest.update(msgspec.json.encode(each) + b"\n")
    return digest.hexdigest()[:12]
