"""All history files of a run as one, newest first. Blocking: call it in a thread.

- Safe while the files are written: a page neither repeats nor leaves out what was there when the first one was read,
  but what is pruned meanwhile.
- Files that are not there yet count as empty; DataError for one that cannot be read, or is of another schema.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from consumers.history.opened import Files
from consumers.history.queries import Cursor, conditions, distinct
from consumers.history.records import STATES, JobRow, Page, SequenceDetail, SequenceFilter, SequenceRow, unpack
from pipeline.errors import DataError, MessageError
from pipeline.queue.live_jobs import parse_log
from pipeline.wire.codec import Unreadable

_STORED = "details.row, details.result, details.sample, details.letter"
_JOB = "job_id, task, group_size, enqueued_at, at, attempts, handed_on, dropped, dead"


class HistoryReader:
    """One run's history; may be used from several threads."""

    def __init__(self, directory: Path) -> None:
        self._files, self._unreadable = Files(directory), Unreadable()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def sequences(self, filter: SequenceFilter, limit: int = 50, before: str = "") -> Page[SequenceRow]:
        """The newest `limit` that fit; `before` is the `next` of the page before."""
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
        """All of one; None when it is not there, or not there any more."""
        sql = f"select {_STORED} from sequences cross join details using (num) where seq_id = ?"
        found = [detail for name in self._files.consumers() for detail in self._details(name, sql, [seq_id])]
        return max(found, key=lambda detail: detail.row.at, default=None)

    def jobs(self, search: str = "", limit: int = 50, before: str = "") -> Page[JobRow]:
        """The newest `limit` whose id contains `search`."""
        where, args = (" and instr(job_id, ?) > 0", [search]) if search else ("", [])
        sql = f"select num, at, {_JOB} from jobs where num < ?{where} order by num desc limit ?"
        found, cursor = self._page(sql, args, limit, before)
        return Page([_job(row[2:]) for row in found], cursor)

    def job(self, job_id: str) -> JobRow | None:
        """One with its events."""
        sql = f"select {_JOB}, log from jobs where job_id = ?"
        found = [_job(row) for name in self._files.consumers() for row in self._files.ask(name, sql, [job_id])]
        return max(found, key=lambda job: job.at, default=None)

    def choices(self) -> dict[str, list[str]]:
        """What there is to filter by: workers, tasks, finish reasons, states."""
        columns = ("worker", "task", "finish_reason", "state")
        names = self._files.consumers()
        return {
            column: sorted({value for name in names for (value,) in self._files.ask(name, distinct(column))})
            for column in columns
        }

    def totals(self) -> dict[str, int]:
        """Sequences that are kept, by state."""
        counts = Counter[str](dict.fromkeys(STATES, 0))
        for name in self._files.consumers():
            for state, count in self._files.ask(name, "select state, count(*) from sequences group by state"):
                counts[state] += count
        return dict(counts)

    def handed_on(self, batch: int = 256) -> Iterator[SequenceDetail]:
        """All that gave samples, oldest first."""
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

    def _details(self, name: str, sql: str, args: Sequence[Any]) -> list[SequenceDetail]:
        return self._files.details(name, self._files.ask(name, sql, args))

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
