"""The producer: rows → deterministic decode jobs → the queue, as far as credit allows.

Waits for credit (unblocked by the trainer's acks and new versions). A restart goes on behind the stored cursor;
what was enqueued already answers `duplicate` or `done`, so nothing runs twice. A broker that lost its newest part
(a power loss) is behind what was enqueued: the source is read again from where the broker stands.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.types import Config
from pipeline.errors import DataError
from pipeline.jobs import Credit, JobQueue, SourceRewound, job_id_for
from pipeline.lifecycle import Role, default_name, role_process
from pipeline.logs import get_logger
from pipeline.messages import DecodeJob
from producers.place import SourcePlace
from producers.sources import Malformed, Row, count_rows, identity, read_rows

_CHUNK = 100
_CREDIT = "credit (sequences, bytes or versions ahead; the trainer frees it, dead letters hold bytes too)"
Placed = tuple[DecodeJob, str]  # a job and the cursor that stands behind it


async def produce(config: Config) -> None:
    """Run the producer role until its source is exhausted or it is asked to stop."""
    rows = count_rows(config.data)
    async with role_process(config, "producer", default_name("producer")) as role:
        queue = JobQueue(role.client, role.keys, partitions=config.consumer.count)
        place = SourcePlace(role)
        cursor = await place.open(rows * config.data.epochs * config.producer.group_size, _credit(config))
        submitter = Submitter(role, queue, cursor)
        while not role.stop.is_set():
            try:
                if await _read_all(config, place, submitter):
                    await place.finish()
                return
            except SourceRewound as back:
                get_logger().warning("reading again: the broker lost its newest part", behind=back.cursor)
                submitter.cursor = back.cursor
                place.rewind()


async def _read_all(config: Config, place: SourcePlace, submitter: Submitter) -> bool:
    """Enqueue everything behind the submitter's cursor; False when asked to stop. Raises SourceRewound."""
    for chunk in _chunks(_jobs(config, submitter.cursor, place)):
        await place.store_skipped()
        if not await submitter.submit(chunk):
            return False
    await place.store_skipped()
    await submitter.confirm()
    return True


class Submitter:
    """Enqueues within credit; `cursor` is that of the newest job that the broker has taken."""

    def __init__(self, role: Role, queue: JobQueue, cursor: str) -> None:
        self._role, self._queue, self.cursor = role, queue, cursor
        self._credit = _credit(role.config)

    async def submit(self, chunk: list[Placed]) -> bool:
        """Enqueue all of a chunk, waiting for credit; False when asked to stop."""
        while chunk:
            jobs, cursors = [job for job, _ in chunk], [cursor for _, cursor in chunk]
            outcomes = await self._queue.enqueue(jobs, self._credit, cursors, behind=self.cursor)
            for job, outcome in zip(jobs, outcomes, strict=True):
                if outcome in ("duplicate", "done"):
                    get_logger().warning("row has the id of an earlier one; not decoded again", row=job.metadata["row"])
            over = outcomes.count("over_credit")
            taken = len(chunk) - over
            self.cursor = cursors[taken - 1] if taken else self.cursor
            chunk = chunk[taken:]
            if taken:
                self._role.status.waiting(None)
            self._role.status.waiting(_CREDIT if over else None)
            if not await self._role.nap(self._role.config.producer.poll_s if over else 0):
                return False
        return True

    async def confirm(self) -> None:
        """Raises SourceRewound when the broker has lost what it had taken."""
        await self._queue.enqueue([], self._credit, behind=self.cursor)


def _credit(config: Config) -> Credit:
    settings = config.producer
    per_version = settings.samples_per_version * config.trainer.checkpoint_every
    return Credit(settings.max_in_flight, per_version, settings.max_staleness, settings.max_in_flight_mb << 20)


def _chunks(jobs: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Lists of up to `_CHUNK`; what came before a malformed row goes out before its error."""
    chunk: list[Placed] = []
    try:
        for job in jobs:
            chunk.append(job)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
    except DataError:
        yield chunk
        raise
    if chunk:
        yield chunk


def _jobs(config: Config, cursor: str, place: SourcePlace) -> Iterator[Placed]:
    done_epoch, done_row = (int(part) for part in cursor.split(":"))
    for epoch in range(config.data.epochs):
        for number, row in enumerate(read_rows(config.data)):
            if isinstance(row, Malformed):
                place.skip(row)
            elif (epoch, number) > (done_epoch, done_row):
                yield _job(config, row, epoch), f"{epoch}:{number}"


def _job(config: Config, row: Row, epoch: int) -> DecodeJob:
    name = identity(row)
    n = config.producer.group_size
    return DecodeJob(
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
