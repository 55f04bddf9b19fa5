"""The producer: rows → deterministic decode jobs → the queue, as far as credit allows.

Waits for credit (unblocked by the trainer's acks and new versions). A restart goes on behind the stored cursor;
what was enqueued already answers `duplicate` or `done`, so nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from itertools import islice
from typing import Any, cast

from pipeline.config.types import Config
from pipeline.errors import ConfigError
from pipeline.jobs import Credit, JobQueue, job_id_for
from pipeline.lifecycle import Role, default_name, role_process
from pipeline.logs import get_logger
from pipeline.messages import DecodeJob
from producers.sources import Malformed, Row, count_rows, fingerprint, read_rows

_CHUNK = 100


async def produce(config: Config) -> None:
    """Run the producer role until its source is exhausted or it is asked to stop."""
    rows = count_rows(config.data)
    async with role_process(config, "producer", default_name("producer")) as role:
        queue = JobQueue(role.client, role.keys, partitions=config.consumer.count)
        source = _Source(role)
        await source.claim(fingerprint(config.data))
        await source.announce(rows * config.data.epochs * config.producer.group_size)
        jobs = _jobs(config, await source.cursor(), source)
        while chunk := list(islice(jobs, _CHUNK)):
            await source.store_malformed()
            if not await _submit(role, queue, chunk):
                return
        await source.store_malformed()
        await source.finish()


async def _submit(role: Role, queue: JobQueue, chunk: list[tuple[DecodeJob, str]]) -> bool:
    """Enqueue all of a chunk, waiting for credit; False when asked to stop."""
    settings = role.config.producer
    credit = Credit(settings.max_in_flight, settings.samples_per_version, settings.max_staleness)
    while chunk:
        outcomes = await queue.enqueue([job for job, _ in chunk], credit, [cursor for _, cursor in chunk])
        over = outcomes.count("over_credit")
        chunk = chunk[len(chunk) - over :]
        role.status.waiting("credit (in-flight or staleness limit; the trainer frees it)" if over else None)
        if not await role.nap(settings.poll_s if over else 0):
            return False
    return True


def _jobs(config: Config, cursor: str, source: _Source) -> Iterator[tuple[DecodeJob, str]]:
    done_epoch, done_row = (int(part) for part in cursor.split(":"))
    for epoch in range(config.data.epochs):
        for number, row in enumerate(read_rows(config.data)):
            if (epoch, number) <= (done_epoch, done_row):
                continue
            if isinstance(row, Malformed):
                source.malformed_row(row)
                continue
            yield _job(config, row, epoch), f"{epoch}:{number}"


def _job(config: Config, row: Row, epoch: int) -> DecodeJob:
    identity = str(row.id) if row.id is not None else repr(row.messages)
    n = config.producer.group_size
    return DecodeJob(
        run=config.run,
        job_id=job_id_for(config.run, identity, epoch, config.sampling, n),
        n=n,
        messages=row.messages,
        sampling=config.sampling,
        truth=row.truth,
        task=config.rollout_matching.task,
        metadata={**row.metadata, "row": identity[:256], "epoch": epoch},
    )


class _Source:
    """The source's place in Redis: cursor, totals, malformed rows."""

    def __init__(self, role: Role) -> None:
        self._client, self._key = role.client, role.keys.source
        self._run, self._path = role.config.run, role.config.data.path
        self._stop_at_malformed = role.config.data.on_malformed == "stop"
        self._malformed = 0

    async def claim(self, data: str) -> None:
        """Tie the run to its data: another file under the same run name would be skipped in silence."""
        await cast("Awaitable[int]", self._client.hsetnx(self._key, "data", data))
        held = await cast("Awaitable[bytes]", self._client.hget(self._key, "data"))
        if held.decode() != data:
            raise ConfigError(
                f"run {self._run!r} was started on other data than {self._path}; give this one a name of its own "
                "(--set run=NAME), or restore the file to go on"
            )

    async def announce(self, total: int) -> None:
        await self._set(total=total)

    async def cursor(self) -> str:
        raw = await cast("Awaitable[bytes | None]", self._client.hget(self._key, "cursor"))
        return raw.decode() if raw else "-1:-1"

    def malformed_row(self, row: Malformed) -> None:
        if self._stop_at_malformed:
            raise row.error()
        self._malformed += 1
        get_logger().warning("row skipped", where=row.where, problem=row.problem)

    async def store_malformed(self) -> None:
        if self._malformed:
            await cast("Awaitable[int]", self._client.hincrby(self._key, "malformed", self._malformed))
            self._malformed = 0

    async def finish(self) -> None:
        await self._set(exhausted=1)

    async def _set(self, **values: Any) -> None:
        await cast("Awaitable[int]", self._client.hset(self._key, mapping=values))
