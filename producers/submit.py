"""The producer: rows → deterministic jobs → the broker, within credit.

- In a deterministic run each job names the optimiser step that trains it, and the one version that may decode it.
- It waits until another producer of its run ends, and for credit (freed by the trainer's acks and new versions).
- Its role fences all that it stores: one that was paused, and comes back late, changes nothing.
- A restart resumes after the stored cursor; jobs enqueued before answer `duplicate` or `done`, so nothing runs twice.
- A broker that lost its newest data (a power loss) is behind what was enqueued: the source is read again from the
  broker's position.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError, RequestError
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.store import ImageWriter
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue import Credit, JobQueue, Outcome, SourceRewound, StepRow, id_in_step, job_id_for
from sluice.pipeline.queue.trained import trained_among
from sluice.pipeline.run.preflight import rows_in_order
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.telemetry.spans import root_of
from sluice.pipeline.wire.messages import DecodeJob
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.source import (
    BEFORE_FIRST,
    Malformed,
    Row,
    SourceProgress,
    count_rows,
    identity,
    read_first,
    read_prompts,
    stored,
)

_PAGE = 100  # rows
_OTHER_S = 60.0  # how long another producer of the run may continue

T = TypeVar("T")
RowItems = tuple[list[Any], str]  # all items of a row, and the cursor after it
Placed = tuple[Any, str]  # an item, and the cursor after it: empty except for a row's last item


async def produce(config: Config) -> None:
    """Run the producer role until its source is exhausted or it is asked to stop."""
    await asyncio.to_thread(rows_in_order, config)  # before anything of it is enqueued
    rows = count_rows(config.data)
    async with role_process(config, "producer", default_name("producer")) as role:
        owner = Ownership(role.client, role.keys, "producer")
        await owner.acquire(deadline_s=_OTHER_S, waiting=role.status.waiting)
        role.spawn(owner.keep())
        progress = SourceProgress(role, owner)
        cursor = await progress.open(rows * config.data.epochs * config.producer.group_size, _credit(config))
        async with _intake(role, rows, owner) as intake:
            submitter = Submitter(role, intake, cursor)
            while not role.stop.is_set():
                try:
                    if await _read_all(config, progress, intake, submitter):
                        await progress.finish(submitter.cursor)
                    break
                except SourceRewound as back:
                    get_logger().warning("reading again: the broker lost its latest writes", behind=back.cursor)
                    submitter.cursor = back.cursor
                    await progress.rewind()
        await owner.release()


async def _read_all(config: Config, progress: SourceProgress, intake: Intake, submitter: Submitter) -> bool:
    """Enqueue everything after the submitter's cursor; False when asked to stop. Raises SourceRewound."""
    rows = _rows(config, submitter.cursor, progress, intake)
    if submitter.cursor == BEFORE_FIRST:  # at the first start nothing is trained; later the broker's data are gone
        rows = _not_trained(config, rows, intake)
    chunks = _chunks(_placed(rows), intake.chunk)
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:  # files are read, hashed and written
        await progress.store_skipped()
        if not (await intake.room() and await submitter.submit(chunk)):
            return False
    await progress.store_skipped()
    await submitter.confirm()
    if not await intake.settled():
        return False
    await submitter.confirm()
    return True


class Submitter:
    """Enqueues within credit; `cursor` is that of the newest row the broker has accepted completely."""

    def __init__(self, role: Role, intake: Intake, cursor: str) -> None:
        self._role, self._intake, self.cursor = role, intake, cursor
        self._credit = _credit(role.config)

    async def submit(self, chunk: list[Placed]) -> bool:
        """Enqueue all of a chunk, waiting for credit; False when asked to stop."""
        while chunk:
            items, cursors = [item for item, _ in chunk], [cursor for _, cursor in chunk]
            outcomes = await self._intake.enqueue(items, self._credit, cursors, behind=self.cursor)
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome in ("duplicate", "done"):
                    get_logger().warning("not enqueued again: the row's id is known", row=item.metadata["row"])
            over = outcomes.count("over_credit")
            taken = len(chunk) - over
            self.cursor = next((cursor for cursor in reversed(cursors[:taken]) if cursor), self.cursor)
            chunk = chunk[taken:]
            if taken:
                self._role.status.waiting(None)
            self._role.status.waiting(WaitKind.CREDIT if over else None)
            if not await self._role.nap(self._role.config.producer.poll_s if over else 0):
                return False
        return True

    async def confirm(self) -> None:
        """Raises SourceRewound if the broker has lost what it had accepted."""
        await self._intake.enqueue([], self._credit, behind=self.cursor)


@contextlib.asynccontextmanager
async def _intake(role: Role, rows: int, owner: Ownership) -> AsyncGenerator[Intake]:
    if role.config.rollout.url is None:
        yield DecodeIntake(role, rows, owner)
        return
    from sluice.producers.rollout_client.intake import rollout_intake

    async with rollout_intake(role, owner) as intake:
        yield intake


def _credit(config: Config) -> Credit:
    settings = config.producer
    per_version = settings.samples_per_version * config.trainer.publish_every
    return Credit(settings.max_in_flight, per_version, settings.max_staleness, settings.max_in_flight_mb << 20)


def _chunks(placed: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of up to `size`; items before a malformed row are yielded before its error."""
    chunk: list[T] = []
    try:
        for item in placed:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except DataError:
        yield chunk
        raise
    if chunk:
        yield chunk


def _placed(rows: Iterator[RowItems]) -> Iterator[Placed]:
    for (*others, last), cursor in rows:
        yield from ((item, "") for item in others)
        yield last, cursor


def _not_trained(config: Config, rows: Iterator[RowItems], intake: Intake) -> Iterator[RowItems]:
    """Skips fully trained rows, if the run's directory is on this host."""
    run_dir, skipped = Path(config.run_dir) / config.run, 0
    for page in _chunks(rows, _PAGE):
        named = [(row, [name for item in row[0] for name in intake.sequences(item)]) for row in page]
        known = trained_among(run_dir, [name for _, names in named for name in names])
        for row, names in named:
            if known.issuperset(names):
                skipped += 1
            else:
                yield row
    if skipped:
        get_logger().warning("trained rows are not enqueued again", rows=skipped)


def _rows(config: Config, cursor: str, progress: SourceProgress, intake: Intake) -> Iterator[RowItems]:
    writer = ImageWriter.of(config)
    done_epoch, done_row = (int(part) for part in cursor.split(":"))
    for epoch in range(max(0, done_epoch), config.data.epochs):
        for number, row in enumerate(read_prompts(config)):
            if isinstance(row, Malformed):
                progress.skip(row, epoch, number)
            elif (epoch, number) > (done_epoch, done_row):
                try:
                    items = intake.items(stored(row, writer), epoch, number)
                except SourceUnavailable as error:  # says nothing about the row: a restart reads it again
                    raise SourceUnavailable(f"{config.data.path}: row {number + 1}: {error}") from error
                except RequestError as error:
                    progress.skip(Malformed(f"{config.data.path}: row {number + 1}", str(error)), epoch, number)
                else:
                    yield items, f"{epoch}:{number}"


_CHUNK = 100


class Intake(Protocol):
    """What rows become, and where it is enqueued."""

    chunk: int  # items enqueued in one call

    def items(self, row: Row, epoch: int, number: int) -> list[Any]:
        """At least one; each has `metadata["row"]`. `number`: of the row in its epoch, from 0.

        Blocks; raises RequestError for what makes the row malformed, SourceUnavailable for what a later try may read.
        """
        ...

    def sequences(self, item: Any) -> list[str]:
        """Ids of the sequences made from it."""
        ...

    async def room(self) -> bool:
        """Wait until the next chunk may be enqueued; False when asked to stop."""
        ...

    async def enqueue(
        self, items: Sequence[Any], /, credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """As JobQueue.enqueue."""
        ...

    async def settled(self) -> bool:
        """Wait until everything enqueued is done; False when asked to stop."""
        ...


class DecodeIntake:
    """A row is one decode job."""

    chunk = _CHUNK

    def __init__(self, role: Role, rows: int, owner: Ownership) -> None:
        """`rows`: of one epoch."""
        self._config, self._rows = role.config, rows
        self.enqueue = JobQueue(role.client, role.keys, partitions=role.config.consumer.count, producer=owner).enqueue

    def items(self, row: Row, epoch: int, number: int) -> list[DecodeJob]:
        """The job covering all members of its group."""
        config = self._config
        if not config.deterministic:
            return [job_of(config, row, epoch)]
        if row.each_image():
            raise RequestError("it has images, and a deterministic run takes none: passes over images share work")
        return [in_its_step(config, job_of(config, row, epoch), epoch * self._rows + number, self._rows)]

    def sequences(self, item: DecodeJob) -> list[str]:
        """Its members."""
        return [f"{item.job_id}:{index}" for index in range(item.n)]

    async def room(self) -> bool:
        """Always: only credit limits it."""
        return True

    async def settled(self) -> bool:
        """Always: the workers do the rest."""
        return True


def job_of(config: Config, row: Row, epoch: int) -> DecodeJob:
    """A row's job, for all members of its group."""
    name, n = identity(row), config.producer.group_size
    job_id = job_id_for(config.run, name, epoch, config.sampling, n)
    return DecodeJob(
        run=config.run,
        job_id=job_id,
        n=n,
        messages=row.messages,
        images=row.image_refs(),
        sampling=config.sampling,
        truth=row.truth,
        task=config.rollout_matching.task,
        trace=root_of(job_id, config.tracing.sample_ratio).carrier() if config.tracing.enabled else {},
        metadata={**row.metadata, "row": name[:256], "epoch": epoch},
        keep_messages=config.rollout_matching.reward is not None,
    )


def in_its_step(config: Config, job: DecodeJob, number: int, rows: int) -> DecodeJob:
    """The job of row `number` of all epochs, from 0, as a deterministic run enqueues it; `rows`: of one epoch.

    Step s trains the rows of index s. Their sequences are of version max(0, s - max_staleness): a version's number is
    that of the step that made it, and credit admits no earlier than at that version.
    """
    per_step = config.producer.samples_per_version // config.producer.group_size
    step, row = divmod(number, per_step)
    place = StepRow(step, row, min(per_step, rows * config.data.epochs - step * per_step))
    version = max(0, step - config.producer.max_staleness)
    job_id = id_in_step(job.job_id, place)
    trace = root_of(job_id, config.tracing.sample_ratio).carrier() if job.trace else {}
    return replace(job, job_id=job_id, trace=trace, min_weight_version=version, max_weight_version=version)


def first_jobs(config: Config, count: int) -> list[DecodeJob]:
    """The jobs of the first `count` rows, as a run would enqueue them; images' bytes are then in the run's store.

    The entry point `sluice.checks: jobs`. Raises DataError for a malformed row, StoreError.
    """
    writer = ImageWriter.of(config)
    return read_first(config, count, lambda row: job_of(config, stored(row, writer), 0))
