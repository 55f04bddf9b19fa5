"""Records what the consumer and the trainer finish; the only writer of a history file.

- Written before the hand-off: if a consumer dies in between, its successor redoes the work and writes it again.
- The first failure is logged and ends the recording: history never stops a role.
- One transaction per call. Writing the same job again keeps its place.
- A job that ended otherwise goes to the end, with new numbers, so that the index reads it: a successor's rewards may
  differ (a random function), and so may its tokens (the broker lost its last second). Agents choose ids of rollouts and
  groups, and may use one again: its sequences leave whatever job had it.
- Beyond `max_sequences` or `max_mb` whole jobs are deleted, oldest first; the newest one always stays. Freed pages are
  reused, so the file neither shrinks nor grows.
- Pruning deletes 3 % of the limit at a time. Ids are hashes, so two index entries rarely share a page, and a
  transaction writes each page once: one large deletion costs far less than a small one with every call.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from sluice.consumers.groups import Group
from sluice.consumers.history.files import TRAINER, consumer_file, history_directory, open_for_writing
from sluice.consumers.history.records import STATES, TEXT_CHARS, SequenceRow, Trained, pack
from sluice.pipeline.config.types import Config
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.telemetry.training_metrics import reward_parts
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample, Wire, encode

_PORTIONS = 32  # of a full file; pruning deletes one at a time
_SEQUENCE = (  # one that is written again, too, has a new number
    "insert or replace into sequences"
    " (num, seq_id, job_id, at, state, finish_reason, worker, task, triggered, version_min, version_max)"
    " values ((select coalesce(max(num), 0) + 1 from sequences), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) returning num"
)
_STORED = (
    "select sequences.at, row, result, sample, letter from sequences cross join details using (num) where seq_id = ?"
)
_JOB = (
    "insert or replace into jobs"
    " (num, job_id, task, group_size, enqueued_at, at, attempts, handed_on, dropped, dead, log)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_BORDER = (
    "select coalesce((select min(num) from jobs where num > (select num from sequences order by num limit 1 offset ?)),"
    " (select max(num) from jobs), 0)"
)
_TRAINED = (  # one that is trained again, too, has a new number, so that the index reads it
    "insert or replace into trained (num, seq_id, step, state, trained)"
    " values ((select coalesce(max(num), 0) + 1 from trained), ?, ?, ?, ?)"
)
R = TypeVar("R")
C = TypeVar("C", contravariant=True)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as stored; messages are compressed."""

    row: SequenceRow
    result: bytes | None = None
    sample: bytes | None = None
    letter: bytes | None = None

    @classmethod
    def of(
        cls, row: SequenceRow, result: SequenceResult | None, sample: TrainingSample | None, letter: DeadLetter | None
    ) -> Finished:
        """Encode and compress the messages."""
        return cls(row=row, result=_small(result), sample=_small(sample), letter=_small(letter))


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One group with all its sequences; `log` as the Lua scripts wrote it."""

    job_id: str
    sequences: list[Finished]
    log: bytes = b""


class _File:
    def __init__(self, path: Path, max_sequences: int = 200_000, max_mb: int = 2048) -> None:
        self._db = open_for_writing(path)
        self._most, self._most_bytes = max(1, max_sequences), max_mb << 20
        (self._page_bytes,) = self._db.execute("pragma page_size").fetchone()

    def close(self) -> None:
        """Close and fold in the write-ahead log, so the file is complete without it."""
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
        self._reload()

    def _reload(self) -> None:
        newest = "select coalesce(max(at), 0) from sequences where num = (select max(num) from sequences)"
        (self._count,) = self._db.execute("select count(*) from sequences").fetchone()
        (self._at,) = self._db.execute(newest).fetchone()

    def record(self, jobs: Sequence[FinishedJob]) -> None:
        """Write finished jobs, oldest first."""
        try:
            with self._transaction() as db:
                for job in jobs:
                    self._write(db, job)
                self._prune(db)
        except BaseException:
            self._reload()
            raise

    def _write(self, db: sqlite3.Connection, job: FinishedJob) -> None:
        rows = [each.row for each in job.sequences]
        self._at = max(self._at, *(row.at for row in rows))
        enqueued_at = min((row.enqueued_at for row in rows if row.enqueued_at), default=0.0)
        place = self._place(db, job, enqueued_at)
        num, at = place or (min([self._write_sequence(db, each) for each in job.sequences]), self._at)
        task = next((row.task for row in rows if row.task), "")
        counts = [sum(row.state == state for row in rows) for state in STATES]
        attempts = max(row.attempt for row in rows)
        facts = (num, job.job_id, task, rows[0].group_size, enqueued_at, at, attempts)
        db.execute(_JOB, (*facts, *counts, job.log))

    def _place(self, db: sqlite3.Connection, job: FinishedJob, enqueued_at: float) -> tuple[int, float] | None:
        """Number and time of the job if it is stored, and ended the same; else None."""
        sql = "select num, at from jobs where job_id = ? and enqueued_at = ?"
        place = db.execute(sql, (job.job_id, enqueued_at)).fetchone()
        return place if place and all(self._is_stored(db, each) for each in job.sequences) else None

    def _is_stored(self, db: sqlite3.Connection, one: Finished) -> bool:
        found = db.execute(_STORED, (one.row.seq_id,)).fetchone()
        return found is not None and found[1:] == _detail(one, found[0])

    def _write_sequence(self, db: sqlite3.Connection, one: Finished) -> int:
        """At the end of the file; returns its number."""
        row = one.row
        stored = db.execute("select num from sequences where seq_id = ?", (row.seq_id,)).fetchone()
        if stored is None:
            self._count += 1
        else:
            db.execute("delete from details where num = ?", stored)
        shown = (row.state, row.finish_reason, row.worker, row.task, row.triggered, row.version_min, row.version_max)
        (num,) = db.execute(_SEQUENCE, (row.seq_id, row.job_id, self._at, *shown)).fetchone()
        db.execute("insert into details values (?, ?, ?, ?, ?)", (num, *_detail(one, self._at)))
        return num

    def _prune(self, db: sqlite3.Connection) -> None:
        if self._count > self._most:
            self._delete_oldest(db, self._count - self._most + self._most // _PORTIONS)
        while self._too_big() and self._delete_oldest(db, self._count // _PORTIONS + 1):
            pass

    def _delete_oldest(self, db: sqlite3.Connection, count: int) -> bool:
        """Whole jobs of at least `count` sequences, but never the newest job; False if none was deleted."""
        (end,) = db.execute(_BORDER, (count - 1,)).fetchone()
        db.execute("delete from details where num < ?", (end,))
        self._count -= db.execute("delete from sequences where num < ?", (end,)).rowcount
        return db.execute("delete from jobs where num < ?", (end,)).rowcount > 0


class TrainedStore(_File):
    def record(self, rows: Sequence[Trained]) -> None:
        """Write what happened to the samples of some steps."""
        with self._transaction() as db:
            for row in rows:
                stored = zlib.compress(pack(row), 1)
                db.execute(_TRAINED, (row.seq_id, row.step, row.state, stored))
            self._prune(db)

    def _prune(self, db: sqlite3.Connection) -> None:
        ends = "select (select min(num) from trained), (select max(num) from trained)"
        oldest, newest = db.execute(ends).fetchone()
        if newest - oldest >= self._most:
            oldest = newest - self._most + 1 + self._most // _PORTIONS
            db.execute("delete from trained where num < ?", (oldest,))
        while self._too_big() and oldest < newest:
            oldest += (newest - oldest) // _PORTIONS + 1
            db.execute("delete from trained where num < ?", (oldest,))


def _detail(one: Finished, at: float) -> tuple[bytes, bytes | None, bytes | None, bytes | None]:
    """Its columns in `details`."""
    return pack(msgspec.structs.replace(one.row, at=at)), one.result, one.sample, one.letter


def _small(message: Wire | None) -> bytes | None:
    return None if message is None else zlib.compress(encode(message), 1)


class _Store(Protocol[C]):
    def record(self, jobs: Sequence[C], /) -> None: ...
    def close(self) -> None: ...


class _Recorder(Generic[R]):
    """Buffers notes until `flush`; opens its file with the first one."""

    def __init__(self, config: Config, open_store: Callable[[], _Store[R]]) -> None:
        self._on, self._open_store = config.history.enabled, open_store
        self._store: _Store[R] | None = None
        self._noted: list[R] = []

    async def flush(self) -> None:
        """Write the buffer."""
        noted, self._noted = self._noted, []
        if noted and self._on:
            await asyncio.to_thread(self._try, lambda: self._write(noted))

    def forget(self) -> None:
        """Discard the buffer: the work will be redone."""
        self._noted = []

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await asyncio.to_thread(self._try, store.close)

    def _write(self, noted: Sequence[R]) -> None:
        if self._store is None:
            self._store = self._open_store()
        self._store.record(noted)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a full disk, a file of another release, …: none may stop the role
            self._on, self._store = False, None
            get_logger().warning(
                "history is no longer written; everything else continues", cause=str(error) or repr(error)
            )


class Recorder(_Recorder[FinishedJob]):
    """The consumer's recorder."""

    def __init__(self, config: Config, partition: int) -> None:
        path, limits = history_directory(config) / consumer_file(partition), config.history
        super().__init__(config, lambda: HistoryStore(path, limits.max_sequences, limits.max_mb))
        self._traces = config.tracing.enabled
        self._logs: dict[str, bytes] = {}  # group id → the longest log that came with any of its entries

    def log(self, group_id: str, raw: bytes) -> None:
        """The job's log, from an entry of the group."""
        if (self._on or self._traces) and len(raw) > len(self._logs.get(group_id, b"")):
            self._logs[group_id] = raw

    def log_of(self, group_id: str) -> bytes:
        """The job's log so far, until its group is encoded."""
        return self._logs.get(group_id, b"")

    def note(self, group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]) -> None:
        self.keep(self.encoded(group, samples, letters))

    def encoded(
        self, group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter]
    ) -> list[FinishedJob]:
        """Input for `keep`; slow, so call it in a thread. Empty if history is off."""
        found: list[FinishedJob] = []
        log = self._logs.pop(group.group_id, b"")
        if self._on:
            self._try(lambda: found.append(_finished(group, samples, letters, log)))
        return found

    def keep(self, finished: list[FinishedJob]) -> None:
        """Write it with the next `flush`."""
        self._noted += finished

    def forget(self) -> None:
        """Discard the buffer: the work will be redone."""
        super().forget()
        self._logs.clear()


class TrainedRecorder(_Recorder[Trained]):
    def __init__(self, config: Config) -> None:
        path, limits = history_directory(config) / TRAINER, config.history
        most, most_mb = (limit * config.consumer.count for limit in (limits.max_sequences, limits.max_mb))
        super().__init__(config, lambda: TrainedStore(path, most, most_mb))

    def note(
        self,
        step: int,
        version: int,
        samples: Sequence[TrainingSample],
        letters: Sequence[DeadLetter],
        handed_at: Mapping[str, float] = {},
    ) -> None:
        """What one step trained, and what was dropped before it; `version` is that of the weights it started from.

        `handed_at`: by sequence id.
        """
        if not self._on:
            return
        for sample in samples:
            about = {
                "handed_at": handed_at.get(sample.seq_id, 0.0),
                "proximal_logprobs": sample.proximal_logprobs,
                "proximal_versions": sample.proximal_versions,
                "response_mask": sample.response_mask,
                "left_out": sample.left_out,
            }
            self._noted.append(Trained(seq_id=sample.seq_id, step=step, version=version, state="trained", **about))
        for each in letters:
            self._noted.append(
                Trained(seq_id=each.seq_id, step=step, version=version, state="dropped", reason=each.reason)
            )


def _finished(
    group: Group, samples: Sequence[TrainingSample], letters: Sequence[DeadLetter], log: bytes
) -> FinishedJob:
    made = {sample.seq_id: sample for sample in samples}
    dropped = {each.seq_id: each for each in letters}
    at = time.time()
    enqueued_at = next((event.at for event in parse_log(log) if event.kind == "enqueued"), 0.0)
    found: list[Finished] = []
    for (index, _), member in sorted(group.members.items(), key=lambda each: each[0]):
        if isinstance(member, DeadLetter):
            row = SequenceRow(
                seq_id=member.seq_id,
                job_id=group.group_id,
                index=index,
                group_size=group.size,
                state=member.state,
                reason=member.reason,
                at=at,
                enqueued_at=enqueued_at,
                worker=member.worker,
                attempt=member.attempts,
            )
            found.append(Finished.of(row, None, None, member))
        else:
            sample, letter = made.get(member.seq_id), dropped.get(member.seq_id)
            row = _row(member, sample, letter, at, group)
            found.append(Finished.of(row, member, sample, letter))
    return FinishedJob(job_id=group.group_id, sequences=found, log=log)


def _row(
    result: SequenceResult, sample: TrainingSample | None, letter: DeadLetter | None, at: float, group: Group
) -> SequenceRow:
    mask = result.response_mask.runs
    versions = [version for version, _ in result.versions.runs if version >= 0]
    return SequenceRow(
        seq_id=result.seq_id,
        job_id=result.group_id,
        index=result.index,
        group_size=group.size,
        task=result.task,
        state="handed_on" if letter is None else "dropped",
        reason="" if letter is None else letter.reason,
        at=at,
        enqueued_at=result.timings.get("enqueued_at", 0.0),
        committed_at=group.committed_at(result),
        queue_s=result.timings.get("queue_s", 0.0),
        decode_s=result.timings.get("decode_s", 0.0),
        worker=result.worker,
        backend=result.backend,
        attempt=result.attempt,
        prompt_tokens=len(result.prompt_token_ids),
        new_tokens=sum(count for value, count in mask if value) if mask else len(result.token_ids),
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        finish_reason=result.finish_reason,
        triggered=bool(result.triggers.get("repeat_terminate")),
        reward=result.reward if sample is None else sample.reward,
        reward_parts={} if sample is None else reward_parts(sample.metrics),
        metrics={} if sample is None else sample.metrics,
        text=result.text[:TEXT_CHARS],
        num_turns=1 if result.turn is None else result.turn,
    )
