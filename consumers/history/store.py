"""The one writer of a history file. Blocking: call it in a thread.

- One transaction per call; what is written again replaces itself at its place, and changes no order.
- Beyond `max_sequences` or `max_mb` the oldest jobs go, whole; the newest one always stays. Freed pages are used
  again: a file does not shrink, and does not grow.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from consumers.history.files import open_for_writing
from consumers.history.records import STATES, SequenceRow, Trained, pack
from pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample, Wire, encode

_CHUNK = 256
_SEQUENCE = (
    "insert into sequences"
    " (seq_id, job_id, at, state, finish_reason, worker, task, triggered, version_min, version_max)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (seq_id) do update set job_id=excluded.job_id,"
    " state=excluded.state, finish_reason=excluded.finish_reason, worker=excluded.worker, task=excluded.task,"
    " triggered=excluded.triggered, version_min=excluded.version_min, version_max=excluded.version_max"
    " returning num, at"
)
_JOB = (
    "insert into jobs (job_id, task, group_size, enqueued_at, at, attempts, handed_on, dropped, dead, log)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (job_id) do update set task=excluded.task,"
    " group_size=excluded.group_size, enqueued_at=excluded.enqueued_at, attempts=excluded.attempts,"
    " handed_on=excluded.handed_on, dropped=excluded.dropped, dead=excluded.dead, log=excluded.log"
)
_TRAINED = (
    "insert into trained (seq_id, step, state, trained) values (?, ?, ?, ?) on conflict (seq_id) do update set"
    " step=excluded.step, state=excluded.state, trained=excluded.trained"
)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as it is stored; messages are compressed."""

    row: SequenceRow
    result: bytes | None = None
    sample: bytes | None = None
    letter: bytes | None = None

    @classmethod
    def of(
        cls, row: SequenceRow, result: SequenceResult | None, sample: TrainingSample | None, letter: DeadLetter | None
    ) -> Finished:
        """Encodes and compresses the messages."""
        return cls(row=row, result=_small(result), sample=_small(sample), letter=_small(letter))


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One group with all of its sequences; `log` as the queue's scripts wrote it."""

    job_id: str
    sequences: list[Finished]
    log: bytes = b""


class _File:
    def __init__(self, path: Path, max_sequences: int, max_mb: int) -> None:
        self._db = open_for_writing(path)
        self._most, self._most_bytes = max(1, max_sequences), max_mb << 20
        (self._page_bytes,) = self._db.execute("pragma page_size").fetchone()

    def close(self) -> None:
        """The file is whole without its write-ahead log afterwards."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("begin immediate")
        try:
            yield self._db
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def _too_big(self) -> bool:
        (pages,) = self._db.execute("pragma page_count").fetchone()
        (free,) = self._db.execute("pragma freelist_count").fetchone()
        return (pages - free) * self._page_bytes > self._most_bytes


class HistoryStore(_File):
    """One consumer's file."""

    def __init__(self, path: Path, max_sequences: int = 200_000, max_mb: int = 2048) -> None:
        super().__init__(path, max_sequences, max_mb)
        self._look()

    def _look(self) -> None:
        self._count, self._newest = self._db.execute("select count(*), coalesce(max(num), 0) from sequences").fetchone()
        (self._at,) = self._db.execute(
            "select coalesce(max(at), 0) from sequences where num = ?", (self._newest,)
        ).fetchone()

    def record(self, jobs: Sequence[FinishedJob]) -> None:
        """Write finished jobs, oldest first."""
        try:
            with self._transaction() as db:
                for job in jobs:
                    self._write(db, job)
                self._prune(db)
        except BaseException:
            self._look()
            raise

    def _write(self, db: sqlite3.Connection, job: FinishedJob) -> None:
        rows = [each.row for each in job.sequences]
        self._at = max(self._at, *(row.at for row in rows))
        for each, row in zip(job.sequences, rows, strict=True):
            shown = (
                row.state,
                row.finish_reason,
                row.worker,
                row.task,
                row.triggered,
                row.version_min,
                row.version_max,
            )
            num, at = db.execute(_SEQUENCE, (row.seq_id, row.job_id, self._at, *shown)).fetchone()
            stored = (pack(msgspec.structs.replace(row, at=at)), each.result, each.sample, each.letter)
            db.execute("insert or replace into details values (?, ?, ?, ?, ?)", (num, *stored))
            if num > self._newest:
                self._count, self._newest = self._count + 1, num
        enqueued_at = min((row.enqueued_at for row in rows if row.enqueued_at), default=0.0)
        task = next((row.task for row in rows if row.task), "")
        counts = [sum(row.state == state for row in rows) for state in STATES]
        attempts = max(row.attempt for row in rows)
        facts = (job.job_id, task, rows[0].group_size, enqueued_at, self._at, attempts)
        db.execute(_JOB, (*facts, *counts, job.log))

    def _prune(self, db: sqlite3.Connection) -> None:
        while self._count > self._most or self._too_big():
            oldest = db.execute("select num, job_id from jobs order by num limit ?", (_CHUNK + 1,)).fetchall()
            if len(oldest) < 2:
                return
            for num, job_id in oldest[:-1]:
                db.execute("delete from details where num in (select num from sequences where job_id = ?)", (job_id,))
                self._count -= db.execute("delete from sequences where job_id = ?", (job_id,)).rowcount
                db.execute("delete from jobs where num = ?", (num,))
                if self._count <= self._most and not self._too_big():
                    return


class TrainedStore(_File):
    """The trainer's file."""

    def __init__(self, path: Path, max_sequences: int = 200_000, max_mb: int = 2048) -> None:
        super().__init__(path, max_sequences, max_mb)

    def record(self, rows: Sequence[Trained]) -> None:
        """Write what became of the samples of some steps."""
        with self._transaction() as db:
            for row in rows:
                stored = zlib.compress(pack(row), 1)
                db.execute(_TRAINED, (row.seq_id, row.step, row.state, stored))
            self._prune(db)

    def _prune(self, db: sqlite3.Connection) -> None:
        (newest,) = db.execute("select coalesce(max(num), 0) from trained").fetchone()
        db.execute("delete from trained where num <= ?", (newest - self._most,))
        while (
            self._too_big()
            and db.execute(
                "delete from trained where num in (select num from trained order by num limit ?) and num < ?",
                (_CHUNK, newest),
            ).rowcount
        ):
            pass


def _small(message: Wire | None) -> bytes | None:
    return None if message is None else zlib.compress(encode(message), 1)
