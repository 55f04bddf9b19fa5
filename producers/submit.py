"""The producer: rows → deterministic decode jobs → the queue, as far as credit allows.

Waits for credit (unblocked by the trainer's acks and new versions). A restart goes on behind the stored cursor;
what was enqueued already answers `duplicate` or `done`, so nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.types import Config
from pipeline.errors import DataError
from pipeline.jobs import Credit, JobQueue, job_id_for
from pipeline.lifecycle import Role, default_name, role_process
from pipeline.logs import get_logger
from pipeline.messages import DecodeJob
from producers.place import SourcePlace
from producers.sources import Malformed, Row, count_rows, identity, read_rows

_CHUNK = 100
Placed = tuple[DecodeJob, str]  # a job and the cursor that stands behind it


async def produce(config: Config) -> None:
    """Run the producer role until its source is exhausted or it is asked to stop."""
    rows = count_rows(config.data)
    async with role_process(config, "producer", default_name("producer")) as role:
        queue = JobQueue(role.client, role.keys, partitions=config.consumer.count)
        place = SourcePlace(role)
        cursor = await place.open(rows * config.data.epochs * config.producer.group_size)
        for chunk in _chunks(_jobs(config, cursor, place)):
            await place.store_skipped()
            if not await _submit(role, queue, chunk):
                return
        await place.store_skipped()
        await place.finish()


async def _submit(role: Role, queue: JobQueue, chunk: list[Placed]) -> bool:
    """Enqueue all of a chunk, waiting for credit; False when asked to stop."""
    settings = role.config.producer
    per_version = settings.samples_per_version * role.config.trainer.checkpoint_every
    credit = Credit(settings.max_in_flight, per_version, settings.max_staleness)
    while chunk:
        outcomes = await queue.enqueue([job for job, _ in chunk], credit, [cursor for _, cursor in chunk])
        for (job, _), outcome in zip(chunk, outcomes, strict=True):
            if outcome in ("duplicate", "done"):
                get_logger().warning("row has the id of an earlier one; not decoded again", row=job.metadata["row"])
        over = outcomes.count("over_credit")
        chunk = chunk[len(chunk) - over :]
        role.status.waiting("credit (in-flight or staleness limit; the trainer frees it)" if over else None)
        if not await role.nap(settings.poll_s if over else 0):
            return False
    return True


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
        sampling=config.sampling,
        truth=row.truth,
        task=config.rollout_matching.task,
        metadata={**row.metadata, "row": name[:256], "epoch": epoch},
    )
