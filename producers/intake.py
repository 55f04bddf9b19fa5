"""What the rows of a source become, and where that goes: here decode jobs; rollouts are in producers/asking/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.queue import Credit, JobQueue, Outcome, job_id_for
from pipeline.run.role import Role
from pipeline.wire.messages import DecodeJob
from producers.sources import Row, identity

_CHUNK = 100


class Intake(Protocol):
    """What rows become, and where that goes."""

    chunk: int  # items that are enqueued in one call

    def items(self, row: Row, epoch: int) -> list[Any]:
        """At least one; each has `metadata["row"]`. Raises DataError."""
        ...

    def sequences(self, item: Any) -> list[str]:
        """Ids of the sequences that come of it."""
        ...

    async def room(self) -> bool:
        """Wait until the next chunk may come; False when asked to stop."""
        ...

    async def enqueue(
        self, items: Sequence[Any], /, credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """As JobQueue.enqueue."""
        ...

    async def settled(self) -> bool:
        """Wait until nothing more is to be done for what was enqueued; False when asked to stop."""
        ...


class DecodeIntake:
    """A row is one decode job."""

    chunk = _CHUNK

    def __init__(self, role: Role) -> None:
        self._config = role.config
        self.enqueue = JobQueue(role.client, role.keys, partitions=role.config.consumer.count).enqueue

    def items(self, row: Row, epoch: int) -> list[DecodeJob]:
        """The job of all members of its group."""
        config, name, n = self._config, identity(row), self._config.producer.group_size
        job = DecodeJob(
            run=config.run,
            job_id=job_id_for(config.run, name, epoch, config.sampling, n),
            n=n,
            messages=row.messages,
            images=row.image_refs(),
            sampling=config.sampling,
            truth=row.truth,
            task=config.rollout_matching.task,
            metadata={**row.metadata, "row": name[:256], "epoch": epoch},
        )
        return [job]

    def sequences(self, item: DecodeJob) -> list[str]:
        """Its members."""
        return [f"{item.job_id}:{index}" for index in range(item.n)]

    async def room(self) -> bool:
        """Credit alone decides."""
        return True

    async def settled(self) -> bool:
        """The workers do the rest."""
        return True
