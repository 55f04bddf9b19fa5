"""All history files of a run as one, newest first. Blocking: call it in a thread.

- Safe while the files are being written: no page repeats or skips a row that existed when the first page was read,
  unless it has been pruned or replaced since. A page's cursor holds, for each file, the number below which the next
  page starts.
- Missing files count as empty; DataError for one that can't be read or has another schema. A file that was replaced by
  another of the same name is reopened.
- Thread-safe: a lock lets one query through at a time.
"""

from __future__ import annotations

import heapq
import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.history.files import TRAINER, consumer_files, open_for_reading
from sluice.consumers.history.records import (
    STATES,
    JobRow,
    Page,
    SequenceDetail,
    SequenceFilter,
    SequenceRow,
    Trained,
    unpack,
)
from sluice.pipeline.errors import DataError, MessageError
from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.wire.codec import T, Unreadable
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample, decode

_STORED = "details.row, details.result, details.sample, details.letter"
_JOB = "job_id, task, group_size, enqueued_at, at, attempts, handed_on, dropped, dead"
_END = 1 << 62


class HistoryReader:
    """One run's history; thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._files, self._unreadable = Files(directory), Unreadable()

    def close(self) -> None:
        self._files.close()

    def sequences(self, filter: SequenceFilter, limit: int = 50, before: str = "") -> Page[SequenceRow]:
        """The newest `limit` matches; `before` is the previous page's `next`."""
        where, args = conditions(filter)
        sql = (
            "select sequences.num, sequences.at, details.row from sequences cross join details using (num)"
            f" where sequences.num < ?{where} order by sequences.num desc limit ?"
        )
        found, cursor = self._page(sql, args, limit, before)
        rows: list[SequenceRow] = []
        for number, _, raw in found:
            try:
                rows.append(unpack(SequenceRow, raw))
            except MessageError as error:
                self._unreadable.skip("history", str(number), error)
        return Page(self._files.with_trained(rows), cursor)

    def sequence(self, seq_id: str) -> SequenceDetail | None:
        """One sequence in full; None if it isn't there, or was pruned."""
        sql = f"select {_STORED} from sequences cross join details using (num) where seq_id = ?"
        names = self._files.consumers()
        found = [one for name in names for one in self._files.details(name, self._files.ask(name, sql, [seq_id]))]
        return max(found, key=lambda detail: detail.row.at, default=None)

    def jobs(self, search: str = "", limit: int = 50, before: str = "") -> Page[JobRow]:
        """The newest `limit` whose id contains `search`."""
        where, args = (" and instr(job_id, ?) > 0", [search]) if search else ("", [])
        sql = f"select num, at, {_JOB} from jobs where num < ?{where} order by num desc limit ?"
        found, cursor = self._page(sql, args, limit, before)
        return Page([_job(row[2:]) for row in found], cursor)

    def job(self, job_id: str) -> JobRow | None:
        """One job with its events."""
        sql = f"select {_JOB}, log from jobs where job_id = ?"
        found = [_job(row) for name in self._files.consumers() for row in self._files.ask(name, sql, [job_id])]
        return max(found, key=lambda job: job.at, default=None)

    def choices(self) -> dict[str, list[str]]:
        """Values to filter by: workers, tasks, finish reasons, states."""
        columns = ("worker", "task", "finish_reason", "state")
        names = self._files.consumers()
        return {
            column: sorted({value for name in names for (value,) in self._files.ask(name, distinct(column))})
            for column in columns
        }

    def totals(self) -> dict[str, int]:
        """Number of stored sequences by state."""
        counts = Counter[str](dict.fromkeys(STATES, 0))
        for name in self._files.consumers():
            for state, count in self._files.ask(name, "select state, count(*) from sequences group by state"):
                counts[state] += count
        return dict(counts)

    def handed_on(self, batch: int = 256) -> Iterator[SequenceDetail]:
        """All sequences that gave samples, oldest first."""
        streams = [self._oldest_first(name, batch) for name in self._files.consumers()]
        return heapq.merge(*streams, key=lambda detail: detail.row.at)

    def _oldest_first(self, name: str, batch: int) -> Iterator[SequenceDetail]:
        sql = (
            f"select sequences.num, {_STORED} from sequences cross join details using (num)"
            " where state = 'handed_on' and sequences.num > ? order by sequences.num limit ?"
        )
        last = -1
        while found := self._files.ask(name, sql, [last, batch]):
            yield from self._files.details(name, [row[1:] for row in found])
            last = found[-1][0]

    def _page(self, sql: str, args: Sequence[Any], limit: int, before: str) -> tuple[list[Any], str]:
        """Rows (num, at, …) of all files, newest first, and the next page's cursor."""
        if limit < 1:
            raise DataError(f"a page has at least 1 row, not {limit}")
        cursor, files, rows = Cursor(before), dict[str, list[int]](), list[list[Any]]()
        for name in self._files.consumers():
            stem = name.removesuffix(".sqlite")
            found = self._files.ask(name, sql, [cursor.below(stem), *args, limit + 1])
            files[stem] = [row[0] for row in found]
            rows.append([(stem, row) for row in found])
        when: Callable[[Any], float] = lambda each: each[1][1]  # noqa: E731
        merged = list(heapq.merge(*rows, key=when, reverse=True))
        taken = Counter(stem for stem, _ in merged[:limit])
        return [row for _, row in merged[:limit]], cursor.after(files, taken) if len(merged) > limit else ""


def _job(row: Sequence[Any]) -> JobRow:
    job_id, task, size, enqueued_at, at, attempts, *rest = row
    states = {state: count for state, count in zip(STATES, rest, strict=False) if count}
    return JobRow(
        job_id=job_id,
        task=task,
        group_size=size,
        enqueued_at=enqueued_at,
        at=at,
        attempts=attempts,
        sequences=sum(states.values()),
        states=states,
        events=parse_log(rest[3]) if len(rest) > 3 else [],
    )


def conditions(wanted: SequenceFilter) -> tuple[str, list[Any]]:
    """`and …` on the table `sequences`, with its arguments."""
    text, args = "", list[Any]()
    # A job is found by `seq_id`; the other two need a full scan, which takes several times as long through an index.
    plus = "+" if wanted.job_id or wanted.version is not None or wanted.search else ""
    if wanted.job_id:
        ids = "seq_id = ? or seq_id >= ? and seq_id < ? or seq_id >= ? and seq_id < ?"  # "id", "id/…", "id:…"
        text = f"{text} and sequences.num in (select num from sequences where {ids}) and job_id = ?"
        args += [wanted.job_id + end for end in ("", "/", "0", ":", ";", "")]
    for name in ("state", "finish_reason", "worker", "task"):
        if value := getattr(wanted, name):
            text, args = f"{text} and {plus}{name} = ?", [*args, value]
    if wanted.triggered is not None:
        text, args = f"{text} and {plus}triggered = ?", [*args, int(wanted.triggered)]
    if wanted.version is not None:
        text, args = f"{text} and version_min <= ? and version_max >= ?", [*args, wanted.version, wanted.version]
    if wanted.search:
        text, args = f"{text} and instr(seq_id, ?) > 0", [*args, wanted.search]
    return text, args


def distinct(column: str) -> str:
    """All values of an indexed column of `sequences`, with one index lookup each."""
    return (
        f"with recursive seen(value) as (select min({column}) from sequences union all"
        f" select (select min({column}) from sequences where {column} > seen.value) from seen"
        " where seen.value is not null) select value from seen where value is not null and value <> ''"
    )


class Cursor:
    """Per file, the number below which to continue."""

    def __init__(self, text: str = "") -> None:
        self._below: dict[str, int] = {}
        for part in text.split(".") if text else ():
            name, _, number = part.rpartition("_")
            if not number.isdecimal() or len(number) > 18:
                raise DataError(f"{text[:80]!r} is not a position in the list; start at the first page")
            self._below[name] = int(number)

    def below(self, file: str) -> int:
        """For a file that the previous page didn't know: nothing."""
        return self._below.get(file, 0 if self._below else _END)

    def after(self, files: Mapping[str, Sequence[int]], taken: Mapping[str, int]) -> str:
        """The cursor after a page: `files` are the numbers found (newest first), `taken` how many of them were used."""
        below = dict(self._below)
        for name, numbers in files.items():
            if used := taken.get(name, 0):
                below[name] = numbers[used - 1]
            else:  # whatever an empty one gets meanwhile is newer than this page
                below[name] = numbers[0] + 1 if numbers else 0
        return ".".join(f"{name}_{number}" for name, number in sorted(below.items()))


class Files:
    """The open files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[Path, tuple[int, sqlite3.Connection]] = {}
        self._one_at_a_time = threading.Lock()

    def close(self) -> None:
        with self._one_at_a_time:
            while self._open:
                self._open.popitem()[1][1].close()

    def consumers(self) -> list[str]:
        """Names of the consumer files that exist now."""
        return consumer_files(self._directory)

    def ask(self, name: str, sql: str, args: Sequence[Any] = ()) -> list[Any]:
        """The rows; none if the file doesn't exist yet. Raises DataError if it can't be read."""
        path = self._directory / name
        with self._one_at_a_time, reading(path):
            db = self._opened(path)
            return [] if db is None else db.execute(sql, args).fetchall()

    def _opened(self, path: Path) -> sqlite3.Connection | None:
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            inode = None
        held = self._open.get(path)
        if held is not None and held[0] == inode:
            return held[1]
        if held is not None:
            del self._open[path]
            held[1].close()
        db = None if inode is None else open_for_reading(path)
        if db is not None and inode is not None:
            self._open[path] = inode, db
        return db

    def with_trained(self, rows: Sequence[SequenceRow]) -> list[SequenceRow]:
        """The rows with their training step, where the trainer has recorded one."""
        marks = ",".join("?" * len(rows))
        sql = f"select seq_id, step, state from trained where seq_id in ({marks})"
        known = {seq_id: (step, state) for seq_id, step, state in self.ask(TRAINER, sql, [row.seq_id for row in rows])}
        return [
            msgspec.structs.replace(row, step=known[row.seq_id][0], trained=known[row.seq_id][1])
            if row.seq_id in known
            else row
            for row in rows
        ]

    def details(self, name: str, found: Sequence[Any]) -> list[SequenceDetail]:
        """Whole sequences from rows (row, result, sample, letter) as stored in that file."""
        path = self._directory / name
        with reading(path):
            rows = self.with_trained([unpack(SequenceRow, row[0]) for row in found])
            trained = self.trained([row.seq_id for row in rows])
            return [
                SequenceDetail(
                    row=row,
                    result=_whole(SequenceResult, result),
                    sample=_whole(TrainingSample, sample),
                    letter=_whole(DeadLetter, letter),
                    trained=trained.get(row.seq_id),
                )
                for row, (_, result, sample, letter) in zip(rows, found, strict=True)
            ]

    def trained(self, seq_ids: Sequence[str]) -> dict[str, Trained]:
        marks = ",".join("?" * len(seq_ids))
        found = self.ask(TRAINER, f"select seq_id, trained from trained where seq_id in ({marks})", seq_ids)
        return {seq_id: unpack(Trained, zlib.decompress(raw)) for seq_id, raw in found}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add the file's name to any error."""
    try:
        yield
    except (sqlite3.Error, zlib.error, msgspec.MsgspecError, MessageError) as error:
        raise DataError(
            f"{path}: cannot be read as a history ({error}); try again if it is busy, delete it if it is damaged"
        ) from error


def _whole(kind: type[T], raw: bytes | None) -> T | None:
    return None if raw is None else decode(kind, zlib.decompress(raw))
