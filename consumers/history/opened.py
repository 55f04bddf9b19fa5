"""The history files of a run, opened for reading as they appear.

- One reader may be used from several threads: a lock lets one query through at a time.
- A file that was replaced by another one of its name is opened anew.
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from consumers.history.files import TRAINER, open_for_reading
from consumers.history.records import SequenceDetail, SequenceRow, Trained, unpack
from pipeline.errors import DataError, MessageError
from pipeline.wire.codec import T
from pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample, decode


class Files:
    """The open files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[Path, tuple[int, sqlite3.Connection]] = {}
        self._one_at_a_time = threading.Lock()

    def close(self) -> None:
        """Close them all."""
        with self._one_at_a_time:
            while self._open:
                self._open.popitem()[1][1].close()

    def consumers(self) -> list[str]:
        """The names of what is there now."""
        return sorted(path.name for path in self._directory.glob("consumer-*.sqlite"))

    def ask(self, name: str, sql: str, args: Sequence[Any] = ()) -> list[Any]:
        """The rows; none of a file that is not there yet. Raises DataError for one that cannot be read."""
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
        """The rows with the step of each, as far as the trainer has recorded one."""
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
        """Whole sequences of rows (row, result, sample, letter) as stored in that file."""
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
    """Names the file in whatever goes wrong."""
    try:
        yield
    except (sqlite3.Error, zlib.error, msgspec.MsgspecError, MessageError) as error:
        raise DataError(
            f"{path}: cannot be read as a history ({error}); try again if it is busy, delete it if it is damaged"
        ) from error


def _whole(kind: type[T], raw: bytes | None) -> T | None:
    return None if raw is None else decode(kind, zlib.decompress(raw))
